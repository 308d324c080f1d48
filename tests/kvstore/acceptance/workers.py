"""What one process of a fleet has: a small float32 model, its block pool, and a prefix store on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from decoding.model import ReadSpec, StopCondition
from decoding.sequence import Sequence
from kvstore.base import ByteStore
from kvstore.build import SharedStore, build_stores
from kvstore.keys import Keyring
from kvstore.store import PrefixStore
from tests.engine.harness import twins
from tests.engine.margin import assert_best
from tests.kvstore.prefixes import ROOT, config, slow
from training.random_models import llama_config
from turnout.types import SamplingParams, Sharing

BLOCK, CHUNK = 4, 8
ANSWER = 5
MODEL = "m"
TINY = llama_config(
    60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1, max_position_embeddings=512
)
PARTS = {"weights": "4", "tokenizer": "t"}
FAR = 1e-3  # logits of a wrong prefix differ by more, those of a right one by less


@dataclass(frozen=True, slots=True)
class Answered:
    """How a prompt was answered: its tokens, and of the prompt's those computed, cached and (of these) fetched."""

    ids: list[int]
    computed: int
    cached: int
    fetched: int


class Worker:
    """A model and a plain one with the same weights; every answer is checked against the plain one.

    Args:
        store: a connection to Redis; None: host memory only.
        stores: of this process, where another worker of it has made them; then `store` and `settings` are not used.
        parts: of the fingerprint.
        seed: of the weights.
        root: the root key.
        chunk: tokens of a chunk.
        shape: of the model.
        settings: of `kvstore`.
    """

    def __init__(
        self,
        store: ByteStore | None,
        stores: SharedStore | None = None,
        parts: Mapping[str, str | int] = PARTS,
        seed: int = 4,
        root: bytes = ROOT,
        chunk: int = CHUNK,
        shape: Any = TINY,
        **settings: Any,
    ) -> None:
        self.model, self.plain = twins(shape, seed=seed, block_size=BLOCK)
        self._owned = stores is None
        if stores is None:
            layout = self.model.layout({name: str(part) for name, part in parts.items()})
            made = config(chunk_tokens=chunk, write_queue=1000, **settings)
            stores = build_stores(made, {MODEL: layout}, store=store, keyring=Keyring(root))
        self.stores = stores
        self.model.share(self.store)
        assert self.model.shared is not None
        self.model.shared._seconds = lambda: slow

    @property
    def store(self) -> PrefixStore:
        """The model's."""
        return self.stores.of(MODEL)

    def sequence(self, prompt: list[int], tenant: str = "alice", sharing: Sharing | None = None) -> Sequence:
        """A greedy request."""
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        sharing = sharing or self.stores.sharing(tenant, prompt)
        return Sequence(prompt, sampling, 0, sharing=sharing, tenant=tenant)

    async def answer(self, prompt: list[int], tenant: str = "alice", sharing: Sharing | None = None) -> Answered:
        """Answer a prompt; every token is what the plain model would say."""
        seq = self.sequence(prompt, tenant, sharing)
        try:
            await self.model.decode(seq, StopCondition())
        finally:
            self.model.release(seq)
        ids = seq.tokens[len(prompt) :]
        assert len(ids) == ANSWER
        rows = self.plain.logits(seq.tokens)[len(prompt) - 1 : -1]
        for place, token in enumerate(ids):
            assert_best(token, rows[place], f"token {place} of the answer")
        meter = seq.meter.models["m"]
        return Answered(ids, meter.prompt_tokens, meter.cached_tokens, meter.fetched_tokens)

    async def logits_error(self, prompt: list[int], tenant: str = "alice") -> float:
        """How far the logits after a prompt are from the plain model's."""
        seq = self.sequence(prompt, tenant)
        [row] = await self.model.extend(seq, want=ReadSpec(draw=None, logits=True))
        self.model.release(seq)
        assert row.logits is not None
        return float((row.logits - self.plain.logits(seq.tokens)[-1]).abs().max())

    async def settle(self) -> None:
        """Until everything that was offered is stored or dropped, and its blocks are given back."""
        assert await self.store.settle(60.0)
        while self.model.shared is not None and self.model.shared.kept:
            await asyncio.sleep(0)

    async def forget(self) -> None:
        """Empty the block pool, as after a restart of the engine."""
        await self.settle()
        pool, taken = self.model.pool, []
        assert pool.num_held == 0
        while pool.num_available:
            taken += pool.allocate(1)
        pool.release(taken)
        assert pool.num_cached == 0

    def poisoned(self) -> bool:
        """Whether the pool holds anything that is no number."""
        return any(bool(torch.isnan(layer).any()) for layer in self.model.store.layers)

    async def close(self) -> None:
        """Nothing may be left behind in the pool."""
        await self.settle()
        self.model.pool.check_integrity()
        assert self.model.pool.num_held == 0
        assert not self.model.batcher.tables
        await self.model.close()
        if self._owned:
            await asyncio.to_thread(self.stores.close)


@asynccontextmanager
async def working(*args: Any, **kwargs: Any) -> AsyncIterator[Worker]:
    """A worker for as long as the block lasts."""
    worker = Worker(*args, **kwargs)
    try:
        yield worker
    finally:
        await worker.close()


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Token ids of the tiny model; different for any other start."""
    return [(start * 7 + i * i + i + start * i) % 57 + 2 for i in range(length)]


async def store_prompt(store: ByteStore, prompt: list[int], tenant: str = "alice", **settings: Any) -> None:
    """Have another worker compute and store a prompt."""
    async with working(store, **settings) as worker:
        await worker.answer(prompt, tenant)
        await worker.settle()
