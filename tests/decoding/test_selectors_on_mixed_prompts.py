"""Bandits over draft lengths on prompts of two kinds: their tokens a second against those of every fixed length."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decoding.drafter_state import Stores
from decoding.selectors._bandit import Bandit
from decoding.selectors.base import Gain
from decoding.selectors.exp3 import Exp3, Exp3Params
from decoding.selectors.ucb import Ucb, UcbParams
from decoding.sequence import Sequence
from turnout.types import SamplingParams, Token

LENGTHS = (1, 2, 3, 4)
PROMPTS, TOKENS = 400, 100


class Fixed:
    """Always the same arm."""

    def __init__(self, arm: int) -> None:
        self._arm = arm

    def begin(self, seq: Sequence, arms: list[str], stores: Stores) -> None:
        """Nothing to learn."""

    def order(self, seq: Sequence, num_arms: int) -> list[int]:
        return [self._arm]

    def observe(self, arm: int, gain: Gain) -> None:
        """Nothing to learn."""


def speed(chooser: Bandit[Any] | Fixed, rates: tuple[float, float], draft_s: float) -> float:
    """Tokens a second of answers by turns of either acceptance rate; verification takes a second."""
    chance, stores = random.Random(0), Stores()
    emitted, seconds = 0, 0.0
    for prompt in range(PROMPTS):
        seq = Sequence([0], SamplingParams(max_tokens=1_000), prompt)
        chooser.begin(seq, [str(length) for length in LENGTHS], stores)
        while len(seq.generated) < TOKENS:
            arm = chooser.order(seq, len(LENGTHS))[0]
            accepted = 0
            while accepted < LENGTHS[arm] and chance.random() < rates[prompt % 2]:
                accepted += 1
            took = 1.0 + draft_s * LENGTHS[arm]
            chooser.observe(arm, Gain(accepted + 1, 5, took))
            seq.extend([Token(0, "m")] * (accepted + 1), {"m": 0})
            seconds += took
        emitted += len(seq.generated)
    return emitted / seconds


@pytest.mark.parametrize(
    ("rates", "draft_s", "best"), [((0.2, 0.8), 0.25, 1), ((0.5, 0.9), 0.1, 4), ((0.6, 0.7), 0.2, 2)]
)
def test_a_bandit_is_as_fast_as_the_best_fixed_length(rates: tuple[float, float], draft_s: float, best: int) -> None:
    fixed = [speed(Fixed(arm), rates, draft_s) for arm in range(len(LENGTHS))]
    assert fixed.index(max(fixed)) == LENGTHS.index(best)
    ucb = speed(Ucb(UcbParams(reward="speed", scope="tenant")), rates, draft_s)
    assert ucb > 0.97 * max(fixed)
    assert ucb > sum(fixed) / len(fixed)
    exp3 = speed(Exp3(Exp3Params(reward="speed", scope="tenant", memory=0)), rates, draft_s)
    assert exp3 > 0.95 * max(fixed)
    assert exp3 > sum(fixed) / len(fixed)
    # What may change its mind later pays for it.
    following = speed(Exp3(Exp3Params(reward="speed", scope="tenant")), rates, draft_s)
    assert following > 0.92 * max(fixed)
    assert following > sum(fixed) / len(fixed)
