"""Small models and a way to run a method on them."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from decoding.fakes import TableModel, pair
from decoding.model import Model, Request
from decoding.sequence import Sequence
from turnout.registry import get_method
from turnout.types import SamplingParams, Segment


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Outcome:
    seq: Sequence
    segments: list[Segment]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.seq.generated]

    @property
    def owners(self) -> str:
        """One letter per token: S or L."""
        return "".join(token.source[0].upper() for token in self.seq.generated)


@pytest.fixture
def make_model() -> Callable[..., TableModel]:
    """A model whose logits depend on the last two tokens; same seed, same weights."""

    def make(name: str, seed: int, vocab: int = 12, scale: float = 2.0, num_parameters: int = 1) -> TableModel:
        table = torch.randn((vocab, vocab, vocab), generator=torch.Generator().manual_seed(seed)) * scale
        # Uneven sharpness, so that entropies differ from context to context.
        table *= torch.rand((vocab, vocab, 1), generator=torch.Generator().manual_seed(seed + 1000)) * 2
        return TableModel(name, lambda tokens: table[tokens[-2], tokens[-1]], vocab, num_parameters)

    return make


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run a method to its end."""

    async def go(
        method: str,
        small: Model,
        large: Model,
        params: dict[str, Any] | None = None,
        *,
        prompt: tuple[int, ...] = (1, 2),
        seed: int = 0,
        eos: tuple[int, ...] = (),
        tokenizer: Any = None,
        **sampling: Any,
    ) -> Outcome:
        info = get_method(method)
        seq = Sequence(prompt, SamplingParams(**{"max_tokens": 24, **sampling}), seed, eos)
        models = pair(small, large, tokenizer)
        segments: list[Segment] = []
        async with aclosing(info.run(Request("r", seq), models, info.parse(params or {}))) as stream:
            async for segment in stream:
                segments.append(segment)
                assert segment.tokens
        assert seq.finished
        assert [t for s in segments for t in s.tokens] == seq.generated
        return Outcome(seq, segments)

    return go
