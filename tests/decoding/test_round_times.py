"""How long a round took, as policies and selectors are told: less what the target read of prompts meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decoding.fakes import TableModel, pair
from decoding.model import Request
from decoding.selectors.first import First
from decoding.speculation import Arm, Speculation
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from tests.decoding.test_undrafted_rounds import ALWAYS, NEVER, Elsewhere, Span, drafter_of, sequence


class Crowded(TableModel):
    """Every operation takes five seconds of its clock, four of which went into the prompts of others."""

    now = reading_s = 0.0

    def reading_seconds(self) -> float:
        return self.reading_s

    def _work(self) -> None:
        self.now += 5.0
        self.reading_s += 4.0

    async def verify(self, *args: Any, **named: Any) -> Any:
        self._work()
        return await super().verify(*args, **named)

    async def decode(self, *args: Any, **named: Any) -> Any:
        self._work()
        return await super().decode(*args, **named)


class Hearing(Span):
    """Keeps the times it is told."""

    def __init__(self, pause: tuple[int, int]) -> None:
        super().__init__(pause)
        self.seconds: list[float] = []

    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        super().observe(draft, verdict, seconds)
        self.seconds.append(seconds)


@pytest.mark.parametrize("pause", [ALWAYS, NEVER])
async def test_time_that_went_into_others_prompts_is_nobodys_fault(make_model: Any, pause: tuple[int, int]) -> None:
    made = make_model("large", 2)
    large, length, seq = Crowded("large", made.next_logits, made.vocab_size), Hearing(pause), sequence()
    models = replace(pair(make_model("small", 1), large), clock=lambda: large.now)
    arms = [Arm(drafter_of("model_chain"), length)]
    async for _ in Speculation(Request("r", seq), models, arms, First(), MatchVerifier()).run():
        pass
    assert len(length.seconds) > 5
    assert set(length.seconds) == {1.0}
    assert seq.meter.speculation.verify_s == 5.0 * len(length.seconds)  # by the clock, as the user has waited


async def test_nobody_becomes_much_faster_by_what_others_read(make_model: Any) -> None:
    """A step is known to take four seconds: what was read meanwhile did not all hold it up."""
    heard = []
    for elsewhere in (False, True):
        made = make_model("large", 2)
        large, length, seq = Crowded("large", made.next_logits, made.vocab_size), Hearing(NEVER), sequence()
        large.step_seconds = lambda: 4.0  # type: ignore[method-assign]
        models = pair(make_model("small", 1), Elsewhere(large) if elsewhere else large)  # type: ignore[arg-type]
        models = replace(models, clock=lambda model=large: model.now)
        arms = [Arm(drafter_of("model_chain"), length)]
        async for _ in Speculation(Request("r", seq), models, arms, First(), MatchVerifier()).run():
            pass
        heard.append(set(length.seconds))
    assert heard == [{2.0}, {5.0}]  # nobody knows in time what a model elsewhere reads
