"""The slot of contrasts: rows combined from the logits of several streams that read the same answer.

A module here assigns its class to `PART`; a request chooses it by file name, next to the method. What it computes for a
row depends on the logits of the row and its context alone, so drafts, forks and replays need nothing more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from decoding.model import Model, ModelPool, ReadSpec
from decoding.parts import Part
from decoding.row_context import RowContext
from decoding.sequence import DEFAULT_SHARING
from turnout.types import Sharing

PACKAGE = "decoding.contrast"
MAIN = ""  # the prompt of the request, and the model that answers it
FAR = 1e4  # nats: what is so far behind the best has probability 0 in float32
NOTHING = ReadSpec(draw=None)

Ask = Callable[[str, int], Awaitable[str]]  # name of a prompt, most tokens -> how the answering model continues it


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks, as text.

    Attributes:
        question: the prompt, or the last user message of a conversation.
        context: the text before it that it is about; "": there is none.
        system: the system message; "": there is none.
    """

    question: str
    context: str = ""
    system: str = ""


@dataclass(frozen=True, slots=True)
class Stream:
    """Stream of logits besides the main one.

    Attributes:
        role: of the model that reads it; MAIN: the one that answers.
        prompt: which of the contrast's `prompts` it reads; MAIN: the request's.
        layer: number of layers, of which the last one's output goes through the head, without the last norm; None: all.
    """

    role: str = MAIN
    prompt: str = MAIN
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class StreamPrompt:
    """Prompt of a stream.

    Attributes:
        tokens: ids, at least one.
        sharing: scope in which other sequences may reuse its cache.
    """

    tokens: tuple[int, ...]
    sharing: Sharing = DEFAULT_SHARING


@dataclass(frozen=True, slots=True)
class StreamRows:
    """Rows that a contrast combines: the next tokens after each prefix of a draft.

    Attributes:
        contexts: of each row, in the main stream.
        hidden: float32 [rows, width] by layer, hidden states of the main stream, of the layers in `Contrast.reads`.
    """

    contexts: Rows[RowContext]
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Contrast(Part):
    """A contrast. Every stream reads the tokens of the answer, whichever of them the combined row chose.

    Attributes:
        off: parameters with which the combined row is the main stream's; no other stream is then read.
    """

    where = "contrast"
    off: ClassVar[Mapping[str, Any]]

    @property
    def is_off(self) -> bool:
        """True if the parameters say so."""
        return all(getattr(self.params, name) == value for name, value in self.off.items())

    def prompts(self, asked: Asked) -> dict[str, Asked]:
        """Prompts that its streams read besides the request's, by name; texts, rendered as the request's is.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the request lacks what they are made of, naming the field.
        """
        return {}

    async def load(self, models: ModelPool, model: Model) -> None:
        """Do what takes long before `streams`, as reading files does, without holding up other requests.

        Args:
            models: see `streams`.
            model: see `streams`.

        Raises:
            TurnoutError: INVALID_ARGUMENT or NOT_FOUND: see `streams`.
        """
        return

    @abstractmethod
    def streams(self, models: ModelPool, model: Model) -> tuple[Stream, ...]:
        """Streams besides the main one, in the order in which `combine` gets them.

        Args:
            models: the pool; of its artifacts, those that the request's tenant may open.
            model: the one that answers.

        Raises:
            TurnoutError: INVALID_ARGUMENT or NOT_FOUND: these models, or an artifact, cannot be worked with.
        """

    def reads(self) -> ReadSpec:
        """Hidden states of the main stream that `combine` needs besides logits; asked after `streams`."""
        return NOTHING

    async def decide(self, ask: Ask) -> Mapping[str, str]:
        """Choose among prompts, once before the first token of an answer.

        Args:
            ask: lets the answering model continue one of `prompts`, greedily; returns the text.

        Returns:
            Prompts that are read in place of those that `streams` names, by the names given there.
        """
        return {}

    @property
    def decide_tokens(self) -> int:
        """Most tokens that `decide` lets the model write: they are no part of the answer, and charged beforehand."""
        return 0

    @abstractmethod
    def combine(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """Combine the streams of one request; rows are the next tokens after each prefix of a draft.

        Args:
            logits: float32 [rows, streams, vocab], finite, the main stream first. Not to be modified.
            rows: what rows these are.

        Returns:
            float32 [rows, vocab], finite: structures and processors come after it, and must find a token that they
            allow. Tokens that are left out stay far behind (`outside`).
        """

    async def combined(self, logits: torch.Tensor, rows: StreamRows) -> torch.Tensor:
        """Return what `combine` does; a contrast that computes for long does it in a thread."""
        return self.combine(logits, rows)


@dataclass(frozen=True, slots=True)
class RequestContrast:
    """Contrast of a request.

    Attributes:
        part: combines the streams.
        prompts: of its streams, by name.
    """

    part: Contrast
    prompts: Mapping[str, StreamPrompt] = field(default_factory=dict)


def plausible(main: torch.Tensor, share: float) -> torch.Tensor:
    """Tokens with at least that share of the greatest probability: logits [rows, vocab] -> bool (Li et al. 2023)."""
    if share <= 0.0:
        return torch.ones_like(main, dtype=torch.bool)
    return main >= main.amax(-1, keepdim=True) + float(torch.tensor(share).log())


def outside(scores: torch.Tensor, kept: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    """Leave out tokens: they come after all that are kept, in the order of the main stream.

    They are not -inf, since a structure may allow no other.

    Args:
        scores: float32 [rows, vocab], finite where tokens are kept.
        kept: bool [rows, vocab].
        main: float32 [rows, vocab], logits of the main stream.
    """
    worst = scores.masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
    worst = torch.where(worst.isfinite(), worst, torch.zeros_like(worst))
    behind = main - main.amax(-1, keepdim=True)
    return torch.where(kept, scores, worst - FAR + behind)
