"""Steps that wait for company: of two models on a device, the dear one's are few and full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from decoding.sequence import Sequence
from engine.company import Prospect, prospect_of, waits_for_company
from engine.device import Device
from engine.pool import LocalPool
from engine.scheduler import Limits
from tests.engine.harness import answer, ask_all, call_of, random_prompts, until
from tests.engine.step_times import Clock, LinearTime
from turnout.calls import GenerateCall
from turnout.types import SamplingParams, Token

LIMITS = Limits(token_budget=100, max_batch=8, max_slowdown=1.75)
# The same for 1 to 8 rows and many more, as where weights are what takes time to read.
SMALL_STEP, LARGE_STEP = LinearTime(base=1e-3, per_token=1e-6), LinearTime(base=1e-2, per_token=1e-5)
SWITCHED = {"share": 0.3, "mean_run": 5.0, "min_stay": 2}


@dataclass
class Waits:
    """An operation, as far as a prospect needs it."""

    remaining: int = 1
    cached: int = 0
    tenant: str = "a"
    background: bool = False


def prospect(*works: Waits, times: LinearTime, counts: Callable[[Any], bool] = bool) -> Prospect | None:
    return prospect_of(works, LIMITS, times, counts)  # type: ignore[arg-type]


def test_what_a_step_wastes_is_what_its_tokens_would_not_cost_in_a_full_one() -> None:
    times = LinearTime(base=2.0, per_token=0.5)
    # A full step takes 2 + 0.5 x 100 = 52 s, 0.52 s a token. Of 3.5 s for three tokens 1.56 s would be spent anyway.
    found = prospect(Waits(), Waits(remaining=2, tenant="b"), Waits(background=True), times=times)
    assert found is not None
    assert found.seconds == pytest.approx(3.5)
    assert found.wasted == pytest.approx((3.5 - 3 * 0.52) / 2)
    assert found.tenants == {"a", "b"}


def test_a_step_holds_no_more_than_its_limits_let_it() -> None:
    times = LinearTime(base=0.0, per_token=1.0, per_sequence=10.0)
    crowd = prospect(*(Waits() for _ in range(20)), times=times)
    assert crowd is not None
    assert crowd.seconds == 8 + 80
    long = prospect(Waits(remaining=90), Waits(remaining=90), Waits(tenant="b"), times=times)
    assert long is not None
    assert (long.seconds, long.tenants) == (100 + 20, frozenset("a"))
    assert prospect(Waits(background=True), times=times) is None


def test_a_step_is_run_for_those_who_may_come_over_and_takes_as_long_as_with_all() -> None:
    times = LinearTime(base=2.0, per_token=0.5)
    found = prospect(Waits(), Waits(), Waits(tenant="b"), times=times, counts=lambda work: work.tenant == "b")
    assert found is not None
    assert (found.seconds, found.tenants) == (3.5, frozenset("b"))
    assert found.wasted == pytest.approx(3.5 - 3 * 0.52)
    assert prospect(Waits(), times=times, counts=lambda work: work.tenant == "b") is None


def waits(mine: float, others: float, held_s: float = 0.0, tenants: tuple[str, str] = ("a", "ab")) -> bool:
    """Whether a step of 4 s that wastes `mine` waits for one of 1 s that wastes `others`."""
    here, there = map(frozenset, tenants)
    return waits_for_company(Prospect(4.0, mine, here), Prospect(1.0, others, there), held_s, LIMITS)


def test_a_step_waits_for_one_that_wastes_less_and_as_long_as_a_prompt_may_hold_it_up() -> None:
    assert waits(0.5, 0.4)
    assert not waits(0.5, 0.5)
    assert waits(0.5, 0.4, held_s=2.0)  # 0.75 x 4 s in all
    assert not waits(0.5, 0.4, held_s=2.1)


def test_who_has_nothing_running_on_the_other_model_is_not_held_up() -> None:
    assert waits(0.5, 0.4, tenants=("a", "a"))
    assert not waits(0.5, 0.4, tenants=("ab", "a"))


@dataclass
class Timed:
    """A pool whose forwards take known times, one after the other."""

    pool: LocalPool
    small: Clock
    large: Clock

    @property
    def seconds(self) -> float:
        return self.small.now + self.large.now


@pytest.fixture
def timed(pool: LocalPool) -> Timed:
    clocks = Clock(SMALL_STEP), Clock(LARGE_STEP)
    for clock, name in zip(clocks, ("small", "large"), strict=True):
        clock.drive(pool.engines[name])
    return Timed(pool, *clocks)


def calls(count: int, method: str, params: dict[str, Any], **options: Any) -> list[GenerateCall]:
    prompts = random_prompts(count, 20, seed=3)
    return [
        call_of(prompt, method, params, max_tokens=40, ignore_eos=True, seed=7 + i, **options)
        for i, prompt in enumerate(prompts)
    ]


async def test_switching_is_much_faster_than_the_large_model_alone(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask_all(timed.pool, calls(24, "plain", {"model": "large"}))
    alone = timed.seconds
    replies = await ask_all(timed.pool, calls(24, "random_switch", SWITCHED))
    together = timed.seconds - alone
    assert together < alone / 1.3
    started = timed.seconds
    monkeypatch.setattr(Device, "holds", lambda device, member: False)
    apart = await ask_all(timed.pool, calls(24, "random_switch", SWITCHED))
    assert timed.seconds - started > 1.2 * together  # in turn, each step has a part of the requests
    assert [each.ids for each in apart] == [each.ids for each in replies]


@pytest.mark.parametrize("tenant", ["default", "other"])
async def test_who_is_held_up_waits_no_longer_than_beside_a_prompt(timed: Timed, tenant: str) -> None:
    seq = Sequence((2, 3, 4), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), 0, tenant=tenant)
    large = timed.pool.engines["large"]
    ends = Ends(timed, large.batcher.runner.run, seq)
    large.batcher.runner.run = ends  # type: ignore[method-assign]
    crowd = asyncio.gather(*(answer(timed.pool, call) for call in calls(8, "random_switch", SWITCHED)))
    await large.decode(seq)
    large.release(seq)
    await crowd
    step = LARGE_STEP.seconds(48, 0, 1)
    beside = [after - before - step for before, after in pairwise(ends.at)]
    assert len(beside) >= 28
    if tenant == "default":
        # ... but for a step of the small model that had begun already when it was known.
        assert 2 * SMALL_STEP.base < max(beside) <= 0.75 * step + SMALL_STEP.seconds(48, 0, 1) + 1e-9
    else:  # nothing of its own runs on the small model: it takes turns, as others do
        assert max(beside) <= SMALL_STEP.seconds(48, 0, 1) + 1e-9


async def test_a_model_whose_turns_come_to_nothing_is_no_company(timed: Timed) -> None:
    small, large = (timed.pool.engines[name].batcher for name in ("small", "large"))
    seqs = [Sequence((2, 3), SamplingParams(max_tokens=9), 0) for _ in range(2)]
    for seq in seqs:
        for name in timed.pool.engines:
            await timed.pool.engines[name].extend(seq)
        seq.append(Token(5, "small"))
    tasks = [
        asyncio.create_task(engine.extend(seq)) for engine, seq in zip((timed.pool.engines.values()), seqs, strict=True)
    ]
    await until(lambda: small.num_waiting == large.num_waiting == 1)
    assert large.device.holds(large)
    small.stuck = True
    assert not large.device.holds(large)
    small.stuck = False
    assert not large.device.holds(small)
    await asyncio.gather(*tasks)
    for seq in seqs:
        for name in timed.pool.engines:
            timed.pool.engines[name].release(seq)


async def test_answers_of_one_model_each_hold_nobody_up(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    holds = Device.holds

    def noted(device: Device, member: Any) -> bool:
        held.append(holds(device, member))
        return held[-1]

    monkeypatch.setattr(Device, "holds", noted)
    await ask_all(timed.pool, calls(4, "plain", {"model": "large"}) + calls(4, "plain", {"model": "small"}))
    assert held
    assert not any(held)
    await ask_all(timed.pool, calls(4, "random_switch", SWITCHED))
    assert any(held)


class Ends:
    """When each forward that feeds one sequence ended, by the clocks of both models."""

    def __init__(self, timed: Timed, run: Callable[[Any], Any], seq: Sequence) -> None:
        self.at: list[float] = []
        self._timed, self._run, self._seq = timed, run, seq

    def __call__(self, feeds: Any) -> Any:
        rows = self._run(feeds)
        if any(feed.table.seq is self._seq for feed in feeds):
            self.at.append(self._timed.seconds)
        return rows
