"""The block pool against a simple model of it, and its promises one by one."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.blocks import BlockPool, OutOfBlocksError
from tests.properties import cases
from turnout.types import BlockHash

NUM_BLOCKS = 7
CONTENTS = [BlockHash(bytes([i])) for i in range(4)]


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of blocks; the model knows references, published contents, and who is evictable."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.holders: list[list[int]] = []
        self.found: dict[BlockHash, int] = {}

    def refs(self, block: int) -> int:
        return sum(holder.count(block) for holder in self.holders)

    @rule(count=st.integers(0, NUM_BLOCKS + 1), after=st.none() | st.integers(0, NUM_BLOCKS - 1))
    def allocate(self, count: int, after: int | None) -> None:
        available = self.pool.num_available
        if count > available:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count, after)
            assert self.pool.num_available == available
            return
        blocks = self.pool.allocate(count, after)
        assert len(set(blocks)) == count
        assert all(self.refs(block) == 0 for block in blocks)
        self.found = {content: block for content, block in self.found.items() if block not in blocks}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for block in holder:
            self.pool.retain(block)
        self.holders.append(list(holder))

    @rule(content=st.sampled_from(CONTENTS))
    def adopt(self, content: BlockHash) -> None:
        block = self.pool.find(content)
        if block is not None:
            self.pool.retain(block)
            self.holders.append([block])

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def publish(self, data: st.DataObject, content: BlockHash) -> None:
        block = data.draw(st.sampled_from([block for holder in self.holders for block in holder]))
        self.pool.publish(block, content)
        if content not in self.found and block not in self.found.values():
            self.found[content] = block

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for holder in self.holders for block in holder]))
        self.pool.unpublish(block)
        self.found = {content: other for content, other in self.found.items() if other != block}

    @rule()
    def clear_cached(self) -> None:
        self.pool.clear_cached()
        self.found = {content: block for content, block in self.found.items() if self.refs(block)}
        assert self.pool.num_cached == 0

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        held = {block for holder in self.holders for block in holder}
        assert self.pool.num_held == len(held)
        assert self.pool.num_available == NUM_BLOCKS - len(held)
        assert self.pool.num_cached == len([block for block in self.found.values() if block not in held])
        for content in CONTENTS:
            assert self.pool.find(content) == self.found.get(content)
        for block in held:
            assert self.pool.is_exclusive(block) == (self.refs(block) == 1)


PoolMachine.TestCase.settings = cases(60, stateful_step_count=40)


@pytest.mark.hypothesis
class TestPool(PoolMachine.TestCase):
    def test_agrees_with_a_simple_model(self) -> None:
        self.runTest()
        assert self.settings.max_examples >= 60


def published(pool: BlockPool, names: list[int]) -> list[int]:
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, CONTENTS[name])
    return blocks


def test_eviction_takes_the_least_recently_released_and_the_tail_before_the_prefix() -> None:
    pool = BlockPool(4, 4)
    first, second = published(pool, [0, 1]), published(pool, [2, 3])
    pool.release(second)
    pool.release(first)
    evicted = []
    for _ in range(4):
        before = [content for content in CONTENTS if pool.find(content) is not None]
        pool.allocate(1)
        evicted += [content for content in before if pool.find(content) is None]
    assert evicted == [CONTENTS[3], CONTENTS[2], CONTENTS[1], CONTENTS[0]]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3, 4)
    pool.release(published(pool, [0]))
    pool.allocate(2)
    assert pool.find(CONTENTS[0]) is not None
    pool.allocate(1)
    assert pool.find(CONTENTS[0]) is None


def test_out_of_blocks_leaves_the_pool_unchanged() -> None:
    pool = BlockPool(4, 4)
    pool.release(published(pool, [0, 1]))
    kept = pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="4 blocks wanted, 3 of 4 available"):
        pool.allocate(4)
    assert (pool.num_held, pool.num_cached, pool.num_available) == (1, 2, 3)
    assert pool.find(CONTENTS[0]) is not None
    assert pool.find(CONTENTS[1]) is not None
    pool.release(kept)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_the_first_block_published_stays_the_one_found() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    pool.publish(first, CONTENTS[0])
    pool.publish(second, CONTENTS[0])
    pool.publish(first, CONTENTS[1])
    assert pool.find(CONTENTS[0]) == first
    assert pool.find(CONTENTS[1]) is None


def test_a_released_block_cannot_be_released_again() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often than it was taken"):
        pool.release(blocks)


def test_blocks_follow_each_other_where_they_can() -> None:
    pool = BlockPool(16, 4)
    first = pool.allocate(3)
    assert first == list(range(first[0], first[0] + 3))
    assert pool.allocate(1, after=first[-1]) == [first[-1] + 1]


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, size)
