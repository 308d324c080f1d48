"""Steps that wait for company: of two models on a device, the dear one's are few and full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from decoding.sequence import Sequence
from engine.device import Device
from engine.scheduler.coscheduling import (
    FIRST_ROWS,
    REMEMBERED_ROWS,
    StepForecast,
    TransferRate,
    forecast_step,
    should_wait,
)
from engine.scheduler.limits import Limits
from pool.local_pool import LocalPool
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
    """An operation, as far as forecast needs it."""

    remaining: int = 1
    cached: int = 0
    tenant: str = "a"
    background: bool = False
    started: bool = True
    moves: bool = True


def forecast(*works: Waits, times: LinearTime) -> StepForecast:
    found = forecast_step(works, LIMITS, times, lambda work: work.moves)  # type: ignore[type-var]
    assert found is not None
    return found


def test_what_a_step_wastes_is_what_its_tokens_would_not_cost_in_a_full_one() -> None:
    times = LinearTime(base=2.0, per_token=0.5)
    # A full step takes 2 + 0.5 x 100 = 52 s, 0.52 s a token. Of 3.5 s for three tokens 1.56 s would be spent anyway.
    found = forecast(Waits(), Waits(remaining=2), Waits(background=True), times=times)
    assert found.seconds == found.running_s == pytest.approx(3.5)
    assert found.wasted == pytest.approx((3.5 - 3 * 0.52) / 2)
    assert (found.rows, found.moving, found.willing, found.full) == (2, 2, 1.0, False)


def test_long_contexts_cost_the_same_in_any_step_and_are_no_waste() -> None:
    times = LinearTime(base=2.0, per_token=0.5, per_position=0.1)
    short, long = (forecast(Waits(cached=cached), Waits(cached=cached), times=times) for cached in (0, 1000))
    assert long.seconds > short.seconds + 100
    assert long.wasted == pytest.approx(short.wasted)


def test_a_step_holds_no_more_than_its_limits_let_it() -> None:
    times = LinearTime(base=0.0, per_token=1.0, per_sequence=10.0)
    crowd = forecast(*(Waits() for _ in range(20)), times=times)
    assert (crowd.seconds, crowd.rows, crowd.full) == (8 + 80, 8, True)
    long = forecast(Waits(remaining=90), Waits(remaining=90), Waits(tenant="b", moves=False), times=times)
    assert (long.seconds, long.rows, long.willing, long.full) == (100 + 20, 2, 1.0, True)
    assert forecast_step([Waits(background=True)], LIMITS, times, bool) is None  # type: ignore[type-var]


def test_prompts_beside_those_that_are_decoded_lengthen_no_wait() -> None:
    times = LinearTime(base=2.0, per_token=0.5)
    prompt = Waits(remaining=60, started=False)
    assert forecast(Waits(), prompt, times=times).running_s == 2.5
    assert forecast(prompt, times=times).running_s == 32.0


def test_a_step_is_as_willing_to_wait_as_the_tenant_with_the_least_to_gain() -> None:
    times = LinearTime(base=2.0)
    mixed = (Waits(), Waits(moves=False), Waits(tenant="b"), Waits(tenant="b"), Waits(tenant="b", moves=False))
    assert (forecast(*mixed, times=times).moving, forecast(*mixed, times=times).willing) == (3, 0.5)
    assert forecast(*mixed, Waits(tenant="c", moves=False), times=times).willing == 0.0


HERE = StepForecast(seconds=4.0, running_s=4.0, wasted=1.0, rows=4, moving=4, willing=1.0, full=False)
THERE = StepForecast(seconds=1.0, running_s=1.0, wasted=0.5, rows=4, moving=4, willing=1.0, full=False)


def waits(held_s: float = 0.0, arrivals: float = 0.25, here: StepForecast = HERE, **there: Any) -> bool:
    return should_wait(here, replace(THERE, **there), arrivals, held_s, LIMITS)


def test_a_step_waits_for_one_that_wastes_less_and_as_long_as_a_prompt_may_hold_it_up() -> None:
    assert waits()
    assert not waits(wasted=1.0)
    assert waits(held_s=2.0)  # 0.75 x 4 s in all
    assert not waits(held_s=2.1)
    assert not waits(here=replace(HERE, seconds=40.0, running_s=1.0))  # long by a prompt, not by those who wait
    assert not waits(here=replace(HERE, full=True))


def test_a_step_waits_where_that_spares_more_than_it_costs() -> None:
    # A row comes over in r of 4 rows, each spares 1 s for all 8 requests; 4 requests wait for 1 s.
    assert waits(arrivals=0.13)
    assert not waits(arrivals=0.12)
    assert not waits(arrivals=1.0, moving=0)
    assert not waits(arrivals=0.13, seconds=1.2)
    assert not waits(arrivals=1.0, rows=100, moving=1, seconds=1.5)  # no more come over than move


def test_who_does_not_move_is_held_up_for_the_less_the_more_of_them_there_are() -> None:
    assert waits(here=replace(HERE, willing=0.5), held_s=0.5)
    assert not waits(here=replace(HERE, willing=0.5), held_s=0.6)
    assert not waits(here=replace(HERE, willing=0.0))


def test_arrivals_follow_what_came_lately() -> None:
    arrivals = TransferRate()
    assert arrivals.per_row == 1 / FIRST_ROWS
    for _ in range(400):
        arrivals.ran(16)
        arrivals.arrived()
        arrivals.arrived()
    assert arrivals.per_row == pytest.approx(1 / 8, rel=0.05)
    for _ in range(200):
        arrivals.ran(16)
    assert arrivals.per_row < 0.001


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
    monkeypatch.setattr(Device, "is_delayed", lambda device, member: False)
    apart = await ask_all(timed.pool, calls(24, "random_switch", SWITCHED))
    assert timed.seconds - started > 1.2 * together  # in turn, each step has a part of the requests
    assert [each.ids for each in apart] == [each.ids for each in replies]


async def test_it_is_as_much_faster_where_every_request_is_of_a_tenant_of_its_own(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [replace(call, tenant=f"t{i}") for i, call in enumerate(calls(24, "random_switch", SWITCHED))]
    await ask_all(timed.pool, several)
    started = timed.seconds
    await ask_all(timed.pool, several)
    together = timed.seconds - started
    monkeypatch.setattr(Device, "is_delayed", lambda device, member: False)
    started = timed.seconds
    await ask_all(timed.pool, several)
    assert timed.seconds - started > 1.1 * together


async def test_answers_of_the_large_model_alone_lose_little_by_others_that_switch(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def seconds_of_plain() -> float:
        started = timed.seconds
        switching = [asyncio.create_task(answer(timed.pool, each)) for each in calls(8, "random_switch", SWITCHED)]
        plain = await ask_all(timed.pool, calls(8, "plain", {"model": "large"}))
        taken = timed.seconds - started
        await asyncio.gather(*switching)
        assert all(len(each.ids) == 40 for each in plain)
        return taken

    with_company = await seconds_of_plain()
    monkeypatch.setattr(Device, "is_delayed", lambda device, member: False)
    assert with_company < 1.15 * await seconds_of_plain()


async def test_a_request_whose_two_models_work_at_once_is_no_company_for_itself(timed: Timed) -> None:
    small, large = (timed.pool.engines[name].batcher for name in ("small", "large"))
    seq = Sequence((2, 3), SamplingParams(max_tokens=9), 0)
    for engine in timed.pool.engines.values():
        await engine.extend(seq)
    seq.append(Token(5, "small"))
    tasks = [asyncio.create_task(engine.extend(seq)) for engine in timed.pool.engines.values()]
    await until(lambda: small.num_waiting == large.num_waiting == 1)
    found = small.forecast(False, large)
    assert found is not None
    assert (found.rows, found.moving) == (1, 0)
    assert not large.device.is_delayed(large)
    await asyncio.gather(*tasks)
    for engine in timed.pool.engines.values():
        engine.release(seq)


async def test_a_hand_over_is_counted_where_the_request_goes(timed: Timed) -> None:
    small, large = timed.pool.engines.values()
    before = [each.batcher.transfers.per_row for each in (small, large)]
    seq = Sequence((2, 3), SamplingParams(max_tokens=9), 0)
    for engine in (small, small, large, large):
        await engine.extend(seq)
        seq.append(Token(5, "small"))
    # It came to the large model once, after two steps of the small one, which nothing came back to.
    came, rows = 1.0, FIRST_ROWS
    for _ in range(2):
        came, rows = came * (1 - 1 / REMEMBERED_ROWS), rows * (1 - 1 / REMEMBERED_ROWS) + 1
    assert large.batcher.transfers.per_row == pytest.approx((came + 1) / rows)
    assert small.batcher.transfers.per_row < before[0]
    for engine in (small, large):
        engine.release(seq)
    assert not small.batcher.device._last


@pytest.mark.parametrize("tenant", ["default", "other"])
async def test_who_is_held_up_waits_no_longer_than_beside_a_prompt(
    timed: Timed, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    seq = Sequence((2, 3, 4), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), 0, tenant=tenant)
    large = timed.pool.engines["large"]
    ends = Ends(timed, large.batcher.runner.run, seq)
    large.batcher.runner.run = ends  # type: ignore[method-assign]
    held: list[bool] = []
    holds = Device.is_delayed

    def noted(device: Device, member: Any) -> bool:
        found = holds(device, member)
        if member is large.batcher and member.has_operation(seq):
            held.append(found)
        return found

    monkeypatch.setattr(Device, "is_delayed", noted)
    crowd = asyncio.gather(*(answer(timed.pool, call) for call in calls(8, "random_switch", SWITCHED)))
    await large.decode(seq)
    large.release(seq)
    await crowd
    step = LARGE_STEP.seconds(48, 0, 1)
    beside = [after - before - step for before, after in pairwise(ends.at)]
    assert len(beside) >= 28
    assert 0.0 < max(beside) <= 0.75 * step + 1e-9
    # Nothing of another tenant's runs on the small model: it never waits for company that gains it nothing.
    assert held
    assert any(held) is (tenant == "default")


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
    assert large.device.is_delayed(large)
    small.stuck = True
    assert not large.device.is_delayed(large)
    small.stuck = False
    assert not large.device.is_delayed(small)
    await asyncio.gather(*tasks)
    for seq in seqs:
        for name in timed.pool.engines:
            timed.pool.engines[name].release(seq)


async def test_answers_of_one_model_each_hold_nobody_up(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    holds = Device.is_delayed

    def noted(device: Device, member: Any) -> bool:
        held.append(holds(device, member))
        return held[-1]

    monkeypatch.setattr(Device, "is_delayed", noted)
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
