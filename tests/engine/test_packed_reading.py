"""Answers read in one forward: the states of separate passes, in any order, whatever the others are (paper #160)."""

from __future__ import annotations

import pytest
import torch

from decoding.aggregators.uni_encoder import STATES, pooled_states
from decoding.model import ModelPool, Request
from decoding.packed_reading import read_packed
from decoding.sequence import Sequence
from tests.conformance.test_identity import pool as pool
from turnout.registry import get_method
from turnout.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWERS = [(5, 6, 7), (5, 6), (9,), (5, 6, 7, 8, 9, 10, 11), (12, 13, 5, 5)]


def prompt() -> Sequence:
    return Sequence([2, 3, 4, 5, 6, 7, 8, 9, 2, 3], SamplingParams(max_tokens=9), 0)


async def test_they_equal_separate_passes(pool: ModelPool) -> None:
    seq, large = prompt(), pool.large
    before = seq.meter.models.get("large")
    assert before is None
    packed = await read_packed(large, seq, ANSWERS, STATES, list, most_rows=10)
    forwards = seq.meter.models["large"].forwards
    assert forwards == 2  # 17 tokens, at most 10 in one
    for answer, rows in zip(ANSWERS, packed, strict=True):
        alone = Sequence([*seq.tokens, *answer], SamplingParams(max_tokens=1), 0)
        [row] = await large.extend(alone, want=STATES)
        large.release(alone)
        assert len(rows) == len(answer)
        assert torch.allclose(rows[-1].hidden[-1], row.hidden[-1], atol=1e-5)
    large.release(seq)


async def test_no_answer_sees_another(pool: ModelPool) -> None:
    seq, large = prompt(), pool.large
    states = await pooled_states(large, seq, ANSWERS)
    turned = await pooled_states(large, seq, ANSWERS[::-1])
    other = await pooled_states(large, seq, [*ANSWERS[:-1], (20, 21, 22, 23)])
    assert torch.allclose(states, turned.flip(0), atol=1e-5)
    assert torch.allclose(states[:-1], other[:-1], atol=1e-5)
    assert not torch.allclose(states[-1], other[-1], atol=1e-2)
    large.release(seq)
    assert large.busy().sequences == 0


async def test_first_finish_frees_the_others(pool: ModelPool) -> None:
    """On the engine: nothing is held, and no more was written than all had written when the first one ended."""
    for seed in range(4):
        seq = Sequence([2, 3, 4], SamplingParams(max_tokens=60, temperature=1.2), seed, tuple(range(5)))
        info = get_method("best_of")
        run = info.run(Request("r", seq), pool, info.parse({"k": 8, "rerank": "first_finish"}))
        held = [pool.large.busy().sequences async for _ in run]
        assert held[-1] == 1
        meter = seq.meter.models["large"]
        assert meter.discarded_tokens <= 7 * (len(seq.generated) + 1)
        pool.large.release(seq)
        assert pool.large.pool.num_held == 0  # type: ignore[attr-defined]
