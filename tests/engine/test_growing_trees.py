"""Trees grown level by level in a draft model's cache, and extra rows beside a draft: logits against plain forwards."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from decoding.drafters.lookahead import window_rows
from decoding.model import Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.match import MatchVerifier
from engine.backends.base import Kernels
from engine.model import EngineModel
from tests.engine.harness import Reference, twins
from training.random_models import llama_config
from turnout.types import SamplingParams

TINY = llama_config(60, hidden_size=32, num_key_value_heads=2, num_hidden_layers=3, pad_token_id=0, eos_token_id=1)
LOGITS = ReadSpec(draw=None, logits=True)


def sequence(*tokens: int) -> Sequence:
    return Sequence(tokens, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), seed=0)


def grown(draw: random.Random, tree: DraftTree, count: int) -> DraftTree:
    """The tree with so many more nodes, each below a random one."""
    tokens, parents = list(tree.tokens), list(tree.parents)
    for _ in range(count):
        parents.append(draw.randrange(ROOT, len(tokens)))
        tokens.append(draw.randrange(2, 60))
    return DraftTree(tuple(tokens), tuple(parents), "draft")


def check(rows: list[Readout], paths: list[list[int]], seq: Sequence, plain: Reference) -> None:
    assert len(rows) == len(paths)
    for row, path in zip(rows, paths, strict=True):
        assert row.logits is not None
        torch.testing.assert_close(row.logits, plain.logits([*seq.tokens, *path])[-1], atol=1e-4, rtol=0)


def paths_of(tree: DraftTree, start: int = 0) -> list[list[int]]:
    return [[tree.tokens[each] for each in tree.path(node)] for node in range(start, len(tree))]


@pytest.fixture(params=["native", "torch", "plain"])
def loaded(request: Any) -> tuple[EngineModel, Reference]:
    kernels: Kernels = request.param
    try:
        return twins(TINY, seed=4, kernels=kernels, block_size=4)
    except Exception as error:
        if kernels == "native" and "engine.kernels" in str(error):
            pytest.skip(str(error))
        raise


async def test_a_tree_grows_in_the_cache(loaded: tuple[EngineModel, Reference]) -> None:
    model, plain = loaded
    draw = random.Random(1)

    async def grow(seq: Sequence, others: int) -> None:
        await model.extend(seq, want=LOGITS)
        tree = DraftTree.empty("draft")
        for level in range(4):
            start = len(tree)
            tree = grown(draw, tree, 1 + (level + others) % 3)
            check(await model.expand(seq, tree, start, LOGITS), paths_of(tree, start), seq, plain)

    # Three at once, so that the forwards are ragged; the pool holds what the trees leave behind.
    await asyncio.gather(*(grow(sequence(2, *(3 + i for i in range(5 * n + 1))), n) for n in range(3)))
    for seq in list(model.batcher.tables):
        answer = (await model.decode(seq)).tokens
        assert [token.id for token in answer] == greedy(plain, seq.tokens[: seq.num_prompt_tokens], len(answer))
        model.release(seq)
    assert model.pool.num_held == 0
    await model.close()


async def test_only_new_nodes_are_fed_unless_the_cache_was_lost(loaded: tuple[EngineModel, Reference]) -> None:
    model, plain = loaded
    fed: list[int] = []
    original = model.batcher.runner.run
    model.batcher.runner.run = lambda feeds: (fed.append(sum(len(f.tokens) for f in feeds)), original(feeds))[1]  # type: ignore[method-assign, func-returns-value]
    seq, tree = sequence(2, 3, 4, 5, 6), DraftTree((7, 8), (ROOT, ROOT), "draft")
    await model.extend(seq, want=LOGITS)
    await model.expand(seq, tree, 0, LOGITS)
    tree = DraftTree((7, 8, 9), (ROOT, ROOT, 1), "draft")
    check(await model.expand(seq, tree, 2, LOGITS), [[8, 9]], seq, plain)
    assert fed == [5, 2, 1]
    other = DraftTree((7, 9, 9), (ROOT, ROOT, 1), "draft")
    check(await model.expand(seq, other, 2, LOGITS), [[9, 9]], seq, plain)
    assert fed[3:] == [3], "another tree than the one in the cache"
    model.batcher.tables[seq].drop()
    check(await model.expand(seq, tree, 2, LOGITS), [[8, 9]], seq, plain)
    assert fed[4:] == [4], "preempted; its full block was still in the pool"
    await model.extend(seq, tokens=(9,), want=LOGITS)
    check(await model.expand(seq, tree, 1, LOGITS), [[8], [8, 9]], seq, plain)
    assert fed[5:] == [1, 3], "the nodes were overwritten"
    model.release(seq)
    await model.close()


async def test_attention_that_sees_no_earlier_nodes_is_fed_the_whole_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = twins(TINY, seed=4, kernels="plain")
    loaded = model.batcher.runner.plan
    monkeypatch.setattr(loaded, "keeps_trees", False)  # as with CUDA's kernels, whose masks are square
    step, masks = loaded.backend.step, []
    monkeypatch.setattr(
        loaded.backend, "step", lambda layout, store: (masks.extend(layout.trees.values()), step(layout, store))[1]
    )
    seq = sequence(2, 3, 4)
    chain, tree = DraftTree((5,), (ROOT,), "draft"), DraftTree((5, 6, 7), (ROOT, 0, 0), "draft")
    await model.expand(seq, chain, 0, LOGITS)
    check(await model.expand(seq, tree, 1, LOGITS), [[5, 6], [5, 7]], seq, plain)
    assert [mask.shape for mask in masks] == [(3, 3)]
    longer = DraftTree.chain([5, 6], "draft")
    await model.expand(seq, chain, 0, LOGITS)
    fed = seq.meter.models["m"].draft_tokens
    check(await model.expand(seq, longer, 1, LOGITS), [[5, 6]], seq, plain)
    assert seq.meter.models["m"].draft_tokens == fed + 1, "a chain goes on behind a chain"
    model.release(seq)
    await model.close()


async def test_extra_rows_see_what_their_mask_says_and_leave_nothing(loaded: tuple[EngineModel, Reference]) -> None:
    model, plain = loaded
    seq = sequence(2, 3, 4)
    best = greedy(plain, seq.tokens, 2)
    tree = DraftTree((best[0], 9, best[1]), (ROOT, ROOT, 0), "draft")
    rows = [[11, 12], [21, 22, 23], [31, 32, 33]]
    draft = DraftTree(tree.tokens, tree.parents, "draft", extra=window_rows(rows, len(tree)))
    verdict = await model.verify(seq, draft, MatchVerifier(), LOGITS)
    assert [token.id for token in verdict.tokens[:2]] == best
    check(verdict.rows[1:4], paths_of(tree), seq, plain)
    window = [[11], [11, 12], [21], [11, 22], [11, 12, 23], [21, 31], [11, 22, 32], [11, 12, 23, 33]]
    check(verdict.rows[4:], window, seq, plain)
    seq.extend(verdict.tokens, {"draft": 1, "m": 1})
    answer = (await model.decode(seq)).tokens
    assert [token.id for token in answer] == greedy(plain, seq.tokens[: -len(answer)], len(answer))
    model.release(seq)
    assert model.pool.num_held == 0
    await model.close()


def greedy(plain: Reference, tokens: list[int], count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(int(plain.logits([*tokens, *found])[-1].argmax()))
    return found
