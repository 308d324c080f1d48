"""PEARL by a clock that jumps: the models work at the same time, and blocks are as long as there is time for."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.sequence import Sequence
from decoding.speed_ratio import RECENT, USUAL, Pace
from tests.decoding.near_models import near
from tests.decoding.virtual_time import play, slow
from turnout.types import SamplingParams

VERIFIERS = ["match", "rejection"]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_models_work_at_the_same_time(make_model: Any, verifier: str) -> None:
    small, large = (slow(model, seconds) for model, seconds in zip(near(make_model), (1.0, 3.0), strict=True))
    seq, seconds = play("pearl", {"draft_length": 3, "verifier": verifier}, small, large, 60)
    speculation = seq.meter.speculation
    assert 0 < speculation.accepted_tokens < 60
    # A round takes as long as the slower of the two, whatever became of it.
    assert seconds == pytest.approx(3.0 * speculation.rounds)
    assert len(large.trace) == speculation.rounds
    for started, ended in large.trace[:-4]:
        overlap = sum(max(min(ended, e) - max(started, s), 0.0) for s, e in small.trace)
        assert overlap > 0.0
    drafted = [sum(s >= started and e <= ended for s, e in small.trace) for started, ended in large.trace]
    assert max(drafted) == 3


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_rate_tends_to_a_block_per_target_step(make_model: Any, verifier: str) -> None:
    """Where all is accepted and both take equally long; speculation drafts while the target waits."""
    block = 5
    params = {"draft_length": block, "verifier": verifier}
    took = {}
    for method in ("pearl", "speculative"):
        small, large = slow(make_model("small", 5), 1.0), slow(make_model("large", 5), float(block))
        seq, took[method] = play(method, params, small, large, 201)
        assert len(seq.generated) == 201
    rate = 201 / took["pearl"] * block
    assert 0.95 * block < rate <= block
    assert took["speculative"] > 1.55 * took["pearl"]


def test_auto_drafts_for_as_long_as_the_target_takes(make_model: Any) -> None:
    for target_s, most, block in ((7.0, 16, 7), (1.0, 16, 1), (0.4, 16, 1), (30.0, 9, 9)):
        small, large = slow(make_model("small", 5), 1.0), slow(make_model("large", 5), target_s)
        seq, _ = play("pearl", {"draft_length": "auto", "most": most}, small, large, 400)
        drafted = seq.meter.speculation.drafted_at
        # Two rounds of the usual length, until both models have been timed.
        assert len(drafted) == max(block, USUAL)
        assert drafted[block - 1] > 3 * sum(drafted[block:])


@pytest.mark.parametrize("drafting", [True, False])
def test_one_stall_leaves_blocks_as_they_are_and_a_change_of_pace_does_not(make_model: Any, drafting: bool) -> None:
    seq = Sequence([1], SamplingParams(), 0)
    pace = Pace(seq, make_model("small", 5), make_model("large", 5), 64)
    for place in range(10):
        stalled = 100.0 if place == 4 else 1.0
        pace.observe(5, 5.0 * (stalled if drafting else 1.0), 5.0 * (1.0 if drafting else stalled))
        assert place < 2 or pace.block == 5
    for _ in range(RECENT // 2 + 1):
        pace.observe(5, 5.0, 10.0)
    assert pace.block == 10
