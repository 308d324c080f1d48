"""Interface that every engine under measurement implements, ours included.

Imported in environments that hold a peer and nothing of ours, so only the standard library is used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Setup:
    """Model to load, and how.

    Attributes:
        model_dir: folder of a Hugging Face checkpoint, tokenizer included.
        dtype: "bfloat16" or "float32", of weights and arithmetic.
        threads: CPU threads of a forward.
        draft_dir: a smaller model of the same vocabulary, for speculative decoding; None decodes plainly.
        gguf_file: the same model with packed weights, for an engine that is measured with those; None: `dtype`.
        weights: how our engine keeps linear weights, as `models.NAME.weights` has it.
    """

    model_dir: str
    dtype: str
    threads: int
    draft_dir: str | None = None
    gguf_file: str | None = None
    weights: str = "dense"


@dataclass(frozen=True, slots=True)
class Generation:
    """The answers to one batch of prompts, all submitted together.

    Attributes:
        seconds: from handing over the prompts to having every answer.
        answers: new token ids, one list a prompt.
        forward_s: seconds of that inside model forwards, where the engine can say.
    """

    seconds: float
    answers: list[list[int]]
    forward_s: float | None = None


class Peer(Protocol):
    """One engine. Created, asked whether it can run, set up once, used, closed."""

    def missing(self) -> str | None:
        """What is not installed here; None when everything is."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions and settings that decide what is measured, for the report."""
        ...

    def setup(self, setup: Setup) -> None:
        """Load the model. May convert the checkpoint; conversions are kept next to `model_dir`."""
        ...

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """Answer every prompt (token ids) greedily.

        Args:
            prompts: submitted together; how they are batched is the engine's business.
            max_tokens: new tokens of each answer.
            stop_at_end: whether the model's end token ends an answer; otherwise all have `max_tokens` tokens.
        """
        ...

    def close(self) -> None:
        """Free the model."""
        ...
