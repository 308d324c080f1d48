"""The prefix cache: leaves are evicted first, tenants never share, nobody computes what another is computing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.cache.blocks import BlockPool, OutOfBlocksError
from engine.cache.hashes import ContentHashes
from engine.cache.table import BlockTable
from engine.model import EngineModel
from engine.scheduler.queued_operation import QueuedOperation
from tests.engine.harness import Reference, twins
from tests.properties import cases
from training.random_models import llama_config
from turnout.types import BlockHash, SamplingParams, Sharing, Token

SIZE = 2
TINY = llama_config(
    60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1, max_position_embeddings=2048
)


class NoTensors:
    """A store for tables that are moved about without a model."""

    def copy_block(self, source: int, target: int, block_size: int) -> None:
        pass


class Cache:
    """Tables over one pool; knows the parent of every block that was ever published."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.tables: list[BlockTable] = []
        self.parents: dict[BlockHash, BlockHash] = {}

    def start(self, tokens: list[int], salt: str) -> None:
        seq = Sequence(tokens, SamplingParams(max_tokens=500), seed=0, sharing=Sharing.private(salt))
        table = BlockTable(seq, self.pool, NoTensors())  # type: ignore[arg-type]
        table.adopt_prefix()
        self.tables.append(table)

    def compute(self, table: BlockTable, count: int) -> None:
        """Feed the next tokens of the sequence, as far as there is memory."""
        fed = table.seq.tokens[len(table) : len(table) + count]
        try:
            table.reserve(len(table) + len(fed))
        except OutOfBlocksError:
            return
        table.filled(fed)

    def grow(self, table: BlockTable, token: int) -> None:
        table.seq.append(Token(token, "m"))
        table.reconcile()

    def fork(self, table: BlockTable) -> None:
        self.tables.append(table.fork(table.seq.fork()))

    def release(self, table: BlockTable) -> None:
        table.drop()
        self.tables.remove(table)

    def check(self) -> None:
        self.pool.check_integrity()
        for table in self.tables:
            chain = table._hashes
            self.parents.update(zip(chain[1:], chain, strict=False))
            for content, block in zip(chain, table.blocks, strict=False):
                assert self.pool.find(content) == block, "a sequence holds a copy of a published block"
        for content, parent in self.parents.items():
            if self.pool.find(content) is not None:
                assert self.pool.find(parent) is not None, "a block outlived its parent"
        held = {(table.seq.sharing, block) for table in self.tables for block in table.blocks}
        assert len({block for _, block in held}) == len(held), "two tenants hold one block"


OPERATIONS = st.tuples(
    st.sampled_from(["start", "start", "compute", "compute", "grow", "fork", "release"]),
    st.integers(0, 100),
    st.integers(0, 100),
)
# Few tokens and few lengths, so that prefixes meet.
PROMPTS = [[token % 2 for token in range(length)] + tail for length in (0, 2, 4, 5) for tail in ([0], [1], [0, 1, 1])]


@cases(300)
@given(st.lists(OPERATIONS, max_size=60), st.integers(4, 14))
def test_leaves_are_evicted_before_their_parents_whatever_the_order_of_release(
    operations: list[tuple[str, int, int]], num_blocks: int
) -> None:
    cache = Cache(num_blocks)
    for name, which, detail in operations:
        if name == "start":
            cache.start(list(PROMPTS[which % len(PROMPTS)]), "ab"[detail % 2])
        elif cache.tables:
            table = cache.tables[which % len(cache.tables)]
            match name:
                case "compute":
                    cache.compute(table, 1 + detail % 5)
                case "grow":
                    cache.grow(table, detail % 2)
                case "fork":
                    cache.fork(table)
                case "release":
                    cache.release(table)
        cache.check()


def test_two_who_computed_the_same_block_end_up_sharing_it() -> None:
    cache = Cache(8)
    for _ in range(2):
        cache.start([3, 4, 5], "a")
    first, second = cache.tables
    for table in (first, second):
        cache.compute(table, 3)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert cache.pool.num_held == 3
    assert second.block_array.tolist() == second.blocks
    cache.check()


def sequence(tokens: list[int], tenant: str = "a") -> Sequence:
    return Sequence(tokens, SamplingParams(temperature=0.0), seed=0, sharing=Sharing.private(tenant), tenant=tenant)


@pytest.fixture(scope="module")
def loaded() -> tuple[EngineModel, Reference]:
    return twins(TINY, seed=4)


def prefix(length: int, seed: int) -> list[int]:
    return [(seed * 7 + i * i + i * seed) % 57 + 2 for i in range(length)]


def computed(seq: Sequence) -> int:
    return seq.meter.models["m"].prompt_tokens


async def right(plain: Reference, seq: Sequence, row: Any) -> None:
    assert float((row.logits - plain.logits(seq.tokens)[-1]).abs().max()) < 1e-4


async def test_a_second_request_computes_only_what_it_does_not_share(loaded: tuple[EngineModel, Reference]) -> None:
    model, plain = loaded
    shared = prefix(1500, seed=1)
    first, second, other = sequence([*shared, 3]), sequence([*shared, 4, 5]), sequence([*shared, 4, 5], "b")
    await model.extend(first)
    [row] = await model.extend(second, want=ReadSpec(logits=True))
    await model.extend(other)
    assert (computed(first), computed(second), computed(other)) == (1501, 1502 - 1488, 1502)
    await right(plain, second, row)
    for seq in (first, second, other):
        model.release(seq)


@pytest.mark.parametrize("budget", [512, 4096])
async def test_requests_that_come_together_compute_a_shared_prefix_once(budget: int) -> None:
    model, plain = twins(TINY, seed=4, token_budget=budget)
    shared = prefix(1500, seed=2)
    seqs = [sequence([*shared, 3 + i, 9]) for i in range(4)] + [sequence([*shared, 3, 9], "b")]
    rows = await asyncio.gather(*(model.extend(seq, want=ReadSpec(logits=True)) for seq in seqs))
    assert [computed(seq) for seq in seqs] == [1502, 14, 14, 14, 1502]
    for seq, [row] in zip(seqs, rows, strict=True):
        await right(plain, seq, row)
        model.release(seq)
    await model.close()


async def test_who_waits_for_a_prefix_goes_on_when_its_author_gives_up() -> None:
    model, plain = twins(TINY, seed=4, token_budget=64)
    shared = prefix(640, seed=3)
    author, heir = sequence([*shared, 3]), sequence([*shared, 4])
    writing = asyncio.create_task(model.extend(author))
    waiting = asyncio.create_task(model.extend(heir, want=ReadSpec(logits=True)))
    while not model.batcher.tables or len(model.batcher.tables[author]) < 200:
        await asyncio.sleep(0)
    assert not model.batcher.tables[heir].blocks
    writing.cancel()
    model.release(author)
    [row] = await waiting
    assert 641 - 400 < computed(heir) < 641 - 100
    await right(plain, heir, row)
    model.release(heir)
    await model.close()


async def test_nobody_waits_for_a_prefix_that_is_the_smaller_part() -> None:
    model, _ = twins(TINY, seed=4, token_budget=4096)
    shared = prefix(64, seed=5)
    seqs = [sequence([*shared, *prefix(100, seed=6 + i)]) for i in range(2)]
    sizes: list[int] = []
    original = model.batcher.runner.run
    model.batcher.runner.run = lambda feeds: (sizes.append(len(feeds)), original(feeds))[1]  # type: ignore[method-assign]
    await asyncio.gather(*(model.extend(seq) for seq in seqs))
    assert sizes == [2]
    for seq in seqs:
        model.release(seq)
    await model.close()


async def test_hashes_of_a_waiting_prompt_are_computed_once(
    loaded: tuple[EngineModel, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = loaded
    seq = sequence(prefix(320, seed=9))
    table = model._table(seq)
    assert len(table.content.first(20)) == 20
    monkeypatch.setattr(ContentHashes, "of", lambda *_: pytest.fail("hashed again"))
    assert table.match_prefix() == []
    work = QueuedOperation(table)
    work.estimate()
    assert (work.remaining, len(table.content.first(20))) == (320, 20)
    model.release(seq)
