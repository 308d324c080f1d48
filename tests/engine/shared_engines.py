"""Engines over small random models that share a prefix store, and sequences to try them with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from tests.engine.harness import Reference, twins
from tests.kvstore.fake_prefixes import FakePrefixes
from training.random_models import llama_config
from turnout.types import SamplingParams, Sharing

SIZE, CHUNK = 4, 8
TINY = llama_config(
    60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1, max_position_embeddings=512
)
EXACT = ReadSpec(draw=None, logits=True)


class Engine:
    """A model with a store, and a plain one with the same weights."""

    def __init__(self, shelf: dict[bytes, torch.Tensor] | None = None, **options: Any) -> None:
        self.model, self.plain = twins(TINY, seed=4, block_size=SIZE, **options)
        self.store = FakePrefixes(CHUNK, shelf)
        self.model.share(self.store)  # type: ignore[arg-type]

    async def read(self, seq: Sequence, keep: bool = False) -> torch.Tensor:
        """Logits after the sequence; released afterwards."""
        [row] = await self.model.extend(seq, want=EXACT)
        assert row.logits is not None
        if not keep:
            self.model.release(seq)
        return row.logits

    async def right(self, seq: Sequence) -> None:
        """As `read`, and they are those of a plain forward."""
        assert difference(await self.read(seq), self.plain, seq) < 1e-4

    async def settled(self) -> None:
        """What was offered is let go of in the next turns of the loop."""
        while self.model.shared is not None and self.model.shared.kept:
            await asyncio.sleep(0)

    async def close(self) -> None:
        await self.settled()
        self.model.pool.check_integrity()
        assert self.model.pool.num_held == 0
        assert not self.model.batcher.tables
        await self.model.close()


def difference(logits: torch.Tensor, plain: Reference, seq: Sequence) -> float:
    return float((logits - plain.logits(seq.tokens)[-1]).abs().max())


@pytest.fixture
async def first() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    await engine.close()


@pytest.fixture
async def second(first: Engine) -> AsyncIterator[Engine]:
    """Another engine with the same weights, a pool of its own, and the same store."""
    engine = Engine(first.store.shelf)
    yield engine
    await engine.close()


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start * 7 + i * i + i) % 57 + 2 for i in range(length)]


def sequence(tokens: list[int], tenant: str = "a", lossy: bool = False, max_tokens: int = 200) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(tokens, sampling, 0, sharing=Sharing.private(tenant), tenant=tenant, lossy=lossy)


def meter(seq: Sequence) -> tuple[int, int, int]:
    """(computed, cached, fetched) tokens of the prompt."""
    mine = seq.meter.models["m"]
    return mine.prompt_tokens, mine.cached_tokens, mine.fetched_tokens
