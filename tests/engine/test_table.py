"""Block tables over real tensors: whatever was done to it, a cache computes what a fresh forward does (oracle K)."""

from __future__ import annotations

import random

import pytest
import torch

from decoding.block import Block
from decoding.model import ReadSpec
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from engine.cache.blocks import BlockPool, OutOfBlocksError
from engine.cache.table import BlockTable
from engine.runner import Feed
from tests.engine.harness import twins
from training.random_models import llama_config
from turnout.types import SamplingParams, Sharing, Token

SIZE = 4
VOCAB = 60
PROMPT = [7, 3, 11, 5, 2, 9, 30, 8, 1, 4]
# Siblings before and after the path 1 -> 3 -> 4; node order differs from depth order.
TREE = DraftTree((20, 21, 22, 23, 24, 25), (-1, -1, 0, 1, 3, 3), "drafter")


class Lab:
    """One model's pool and tensors, with tables driven by hand."""

    def __init__(self) -> None:
        config = llama_config(VOCAB, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1)
        self.model, self.plain = twins(config, seed=4, block_size=SIZE, num_blocks=48)
        self.reset()

    def reset(self) -> None:
        self.pool = BlockPool(48, SIZE)

    def table(self, tokens: list[int], salt: str = "") -> BlockTable:
        seq = Sequence(tokens, SamplingParams(max_tokens=500), seed=0, sharing=Sharing.private(salt))
        return BlockTable(seq, self.pool, self.model.store)

    def run(self, table: BlockTable, tokens: list[int], tree: DraftTree | None = None) -> torch.Tensor:
        """Feed tokens and a tree after the cached ones; logits of every fed position."""
        fed = tokens + (list(tree.tokens) if tree is not None else [])
        table.reserve(len(table) + len(fed))
        reads = [(i, RowContext(table.seq), ReadSpec(draw=None, logits=True)) for i in range(len(fed))]
        block = None if tree is None else Block.of_tree(tree)
        rows = self.model.batcher.runner.run([Feed(table, fed, block, reads=reads)])[0]
        table.filled(tokens)
        return torch.stack([row.logits for row in rows if row.logits is not None])

    def fill(self, table: BlockTable) -> None:
        """Compute the whole sequence."""
        self.run(table, table.seq.tokens[len(table) :])

    def check(self, *tables: BlockTable) -> None:
        """K: one token fed to a fork of each table gives the logits of a fresh forward; nothing leaks."""
        for table in tables:
            probe = table.fork(Sequence([*table.tokens, 6], SamplingParams(), seed=0))
            got = self.run(probe, [6])[0]
            torch.testing.assert_close(got, self.plain.logits([*table.tokens, 6])[-1], atol=1e-4, rtol=0)
            probe.drop()
        self.pool.check_integrity()
        assert self.pool.num_held == len({block for table in tables for block in table.blocks})


@pytest.fixture(scope="module")
def loaded() -> Lab:
    return Lab()


@pytest.fixture
def lab(loaded: Lab) -> Lab:
    loaded.reset()
    for layer in loaded.model.store.layers:
        layer.fill_(1e3)  # a slot that is read without having been written shows
    return loaded


def append(table: BlockTable, *tokens: int) -> None:
    for token in tokens:
        table.seq.append(Token(token, "m"))


def test_reconcile_keeps_what_agrees_and_drops_the_rest(lab: Lab) -> None:
    table = lab.table(PROMPT)
    lab.fill(table)
    lab.run(table, [20, 21, 22])
    assert table.reconcile((20, 21, 22)) == 13
    assert table.reconcile((20, 40)) == 11
    lab.check(table)
    lab.run(table, [33, 34])
    append(table, 20, 33, 50)
    assert table.reconcile() == 12
    assert table.tokens == [*PROMPT, 20, 33]
    lab.check(table)


def test_reconcile_gives_up_rows_that_must_be_read(lab: Lab) -> None:
    table = lab.table(PROMPT)
    lab.fill(table)
    assert table.reconcile(compute_from=9) == 9
    assert table.reconcile(compute_from=40) == 9
    assert len(table.blocks) == 3
    lab.check(table)


@pytest.mark.parametrize("length", range(10))
def test_truncate_keeps_a_prefix(lab: Lab, length: int) -> None:
    table = lab.table(PROMPT)
    lab.fill(table)
    table.truncate(length)
    assert table.tokens == PROMPT[:length]
    assert len(table.blocks) == -(-length // SIZE)
    lab.check(table)
    lab.fill(table)
    lab.check(table)


@pytest.mark.parametrize("before", range(8, 12))
@pytest.mark.parametrize("path", [(), (0,), (1,), (0, 2), (1, 3), (1, 3, 4), (1, 3, 5)])
def test_a_verified_tree_leaves_the_committed_path(lab: Lab, before: int, path: tuple[int, ...]) -> None:
    tokens = (PROMPT * 2)[:before]
    table = lab.table(tokens)
    logits = lab.run(table, tokens, TREE)
    for node in range(len(TREE)):
        branch = [TREE.tokens[i] for i in TREE.path(node)]
        fresh = lab.plain.logits([*tokens, *branch])[-1]
        torch.testing.assert_close(logits[before + node], fresh, atol=1e-4, rtol=0)
    table.commit_path(before, path, [TREE.tokens[i] for i in path])
    assert table.tokens == [*tokens, *(TREE.tokens[i] for i in path)]
    assert len(table.blocks) == -(-len(table) // SIZE)
    lab.check(table)
    append(table, *(TREE.tokens[i] for i in path), 41)
    assert table.reconcile() == before + len(path)
    lab.fill(table)
    lab.check(table)


def test_a_fork_shares_blocks_until_one_writes(lab: Lab) -> None:
    table = lab.table(PROMPT)
    lab.fill(table)
    twin = table.fork(table.seq.fork())
    assert twin.blocks == table.blocks
    assert lab.pool.num_held == 3
    append(twin, 40, 41)
    lab.fill(twin)
    append(table, 50)
    lab.fill(table)
    assert twin.blocks[:2] == table.blocks[:2]
    assert twin.blocks[2] != table.blocks[2]
    lab.check(table, twin)
    table.drop()
    lab.check(twin)


def test_a_fork_of_a_sequence_that_is_ahead_takes_only_what_agrees(lab: Lab) -> None:
    table = lab.table(PROMPT)
    lab.fill(table)
    lab.run(table, [20, 21, 22])
    twin = table.fork(table.seq.fork())
    assert twin.tokens == PROMPT
    lab.check(table, twin)


def test_a_prefix_is_adopted_and_one_token_left_to_compute(lab: Lab) -> None:
    table = lab.table(PROMPT[:8])
    lab.fill(table)
    same, longer, other = lab.table(PROMPT[:8]), lab.table([*PROMPT[:8], 40]), lab.table([*PROMPT[:5], 40, 41, 42, 43])
    assert (same.adopt_prefix(), longer.adopt_prefix(), other.adopt_prefix()) == (4, 8, 4)
    assert (same.cached_on_arrival, longer.cached_on_arrival, other.cached_on_arrival) == (4, 8, 4)
    assert longer.blocks == table.blocks
    for adopted in (same, longer, other):
        lab.fill(adopted)
    lab.check(table, same, longer, other)


def test_a_released_prefix_is_found_until_it_is_evicted(lab: Lab) -> None:
    table = lab.table(PROMPT)
    lab.fill(table)
    table.drop()
    assert lab.pool.num_cached == 2
    again = lab.table(PROMPT)
    assert again.adopt_prefix() == 8
    again.drop()
    lab.pool.release(lab.pool.allocate(48))
    assert lab.table(PROMPT).adopt_prefix() == 0


def test_what_a_preempted_sequence_finds_again_is_not_cached_on_arrival(lab: Lab) -> None:
    table = lab.table(PROMPT)
    assert table.adopt_prefix() == 0
    lab.fill(table)
    table.drop()
    assert table.adopt_prefix() == 8
    assert table.cached_on_arrival == 0


def test_salts_separate_what_is_found(lab: Lab) -> None:
    table = lab.table(PROMPT, salt="a")
    lab.fill(table)
    assert lab.table(PROMPT, salt="b").adopt_prefix() == 0
    assert lab.table(PROMPT).adopt_prefix() == 0
    mine = lab.table(PROMPT, salt="a")
    assert mine.adopt_prefix() == 8
    mine.drop()


def test_a_truncated_published_block_is_never_found_with_other_content(lab: Lab) -> None:
    table = lab.table(PROMPT[:8])
    lab.fill(table)
    table.truncate(6)
    lab.run(table, [44, 45])
    seeker = lab.table([*PROMPT[:8], 40])
    assert seeker.adopt_prefix() == 4
    lab.fill(seeker)
    lab.check(table, seeker)


def test_a_truncated_block_somebody_else_holds_is_copied_before_writing(lab: Lab) -> None:
    table = lab.table(PROMPT[:8])
    lab.fill(table)
    holder = lab.table([*PROMPT[:8], 40])
    assert holder.adopt_prefix() == 8
    table.truncate(6)
    lab.run(table, [44, 45])
    lab.fill(holder)
    lab.check(table, holder)


def test_hypothetical_tokens_are_not_published(lab: Lab) -> None:
    table = lab.table(PROMPT[:6])
    lab.fill(table)
    lab.run(table, [20, 21, 22])
    table.drop()
    seeker = lab.table([*PROMPT[:6], 20, 21, 22, 23])
    assert seeker.adopt_prefix() == 4
    seeker.drop()


def test_blocks_left_by_a_failed_forward_do_not_shift_an_adopted_prefix(lab: Lab) -> None:
    failed = lab.table(PROMPT)
    failed.reserve(10)
    other = lab.table(PROMPT)
    lab.fill(other)
    assert failed.adopt_prefix() == 8
    lab.fill(failed)
    lab.check(failed, other)


def test_a_reservation_that_does_not_fit_changes_nothing(lab: Lab) -> None:
    table = lab.table(PROMPT)
    lab.fill(table)
    twin = table.fork(table.seq.fork())
    taken = lab.pool.allocate(lab.pool.num_available - 1)
    before = list(twin.blocks)
    assert twin.blocks_needed(13) == 2
    with pytest.raises(OutOfBlocksError):
        twin.reserve(13)
    assert twin.blocks == before
    assert lab.pool.num_available == 1
    twin.reserve(12)
    assert lab.pool.num_available == 0
    lab.pool.release(taken)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_operations_keeps_every_cache_right(lab: Lab, seed: int) -> None:
    choose = random.Random(seed)
    tables = [lab.table(PROMPT)]
    for _ in range(60):
        table = choose.choice(tables)
        match choose.choice(["fill", "guess", "tree", "fork", "new", "drop", "append", "truncate"]):
            case "fill" if len(table) < len(table.seq):
                table.adopt_prefix()
                table.reconcile()
                lab.fill(table)
            case "guess" if len(table) == len(table.seq):
                lab.run(table, choose.choices(range(VOCAB), k=choose.randint(1, 6)))
            case "tree" if len(table) == len(table.seq):
                base = len(table)
                lab.run(table, [], TREE)
                path = choose.choice([(), (0, 2), (1, 3, 5)])
                table.commit_path(base, path, [TREE.tokens[i] for i in path])
            case "fork" if len(tables) < 5:
                tables.append(table.fork(table.seq.fork()))
            case "new" if len(tables) < 5:
                tables.append(lab.table([*PROMPT[: choose.randint(1, 10)], *choose.choices(range(VOCAB), k=3)]))
                tables[-1].adopt_prefix()
            case "drop" | "truncate" as how:
                table.truncate(choose.randint(0, len(table))) if how == "truncate" else table.drop()
            case "append" if len(table.seq) < 30:
                append(table, *choose.choice([(20, 22), (21,), (40, 3, 3)]))
                table.reconcile()
            case _:
                continue
        lab.check(*tables)
