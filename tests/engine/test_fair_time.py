"""Tenants share a model's time equally: what they are owed, how long steps may be, and what a request feels of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.fairness import LARGEST_BALANCE_S, MARGIN, FairShare
from pool.local_pool import LocalPool
from tests.engine.crowds import METHODS, alone_and_beside, latency, load
from tests.engine.harness import answer, call_of, pair_config
from tests.engine.step_times import Clock, LinearTime

# Nearly flat up to a few rows, then linear, as forwards are.
TIMES = {"base": 4e-3, "per_token": 1e-4, "per_position": 1e-7, "per_sequence": 2e-4}


def test_one_tenant_is_not_bounded_and_owes_nothing() -> None:
    shares = FairShare()
    assert shares.longest_step({"a": 3.0}, {}) == inf
    shares.charge({"a": 3.0}, {"a"}, 3.0)
    assert shares.owed("a") == 0.0


def test_a_step_is_at_most_n_times_what_any_tenant_needs_alone() -> None:
    assert FairShare().longest_step({"a": 50.0, "b": 3.0}, {}) == pytest.approx(MARGIN * 6.0)
    assert FairShare().longest_step({"a": 50.0, "b": 3.0, "c": 4.0}, {}) == pytest.approx(MARGIN * 9.0)


def test_a_tenant_that_waits_for_another_model_has_its_own_step_still_to_come() -> None:
    assert FairShare().longest_step({"a": 50.0}, {"b": 3.0}) == pytest.approx(MARGIN * 6.0 - 3.0)
    shares = FairShare()
    shares.charge({"a": 0.9}, {"a", "b"}, 0.9)
    # Half of what it would bear if it were owed nothing.
    assert shares.longest_step({"a": 0.9}, {"b": 0.3}) == pytest.approx((MARGIN * 0.6 - 0.3) / 2)


def test_what_a_tenant_missed_is_given_back() -> None:
    shares = FairShare()
    shares.charge({"a": 0.4}, {"a", "b"}, 0.4)  # b came while a step of a was under way: it is owed half of it
    assert (shares.balance("a"), shares.owed("a")) == (pytest.approx(-0.2), 0.0)
    assert shares.owed("b") == pytest.approx(0.2)
    # 2 x (0.3 - 0.2) is less than its own step, and half of what others would have beside it.
    assert shares.longest_step({"a": 0.4, "b": 0.3}, {}) == pytest.approx((0.3 + MARGIN * 0.6) / 2)
    shares.charge({"b": 0.3}, {"a", "b"}, 0.3)
    assert shares.owed("b") == pytest.approx(0.05)
    assert shares.balance("a") == pytest.approx(-0.05)
    assert shares.longest_step({"a": 4.0, "b": 0.3}, {}) == pytest.approx(MARGIN * 2 * (0.3 - 0.05))


def test_rows_that_share_a_step_cheaply_make_no_debt() -> None:
    shares = FairShare()
    for _ in range(50):  # all get more than a third, for what any step takes is theirs together
        shares.charge({"a": 0.5, "b": 0.3, "c": 0.3}, {"a", "b", "c"}, 0.6)
    assert (shares.balance("b"), shares.balance("c")) == (0.0, 0.0)
    shares.charge({"a": 0.5, "b": 0.3}, {"a", "b", "c"}, 0.6)
    assert shares.owed("c") == pytest.approx(0.2)


def test_what_is_owed_to_who_leaves_fades() -> None:
    shares = FairShare()
    shares.charge({"a": 0.4}, {"a", "b", "c"}, 0.4)
    shares.charge({"a": 0.4}, {"a", "c"}, 0.4)
    assert 0.0 < shares.owed("b") < 0.4 / 3 < shares.owed("c")
    for _ in range(200):
        shares.charge({"a": 0.4}, {"a"}, 0.4)
    assert (shares.owed("b"), shares.owed("c"), shares.balance("a")) == (0.0, 0.0, 0.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(1e-3, 5.0)), max_size=30))
def test_balances_stay_within_bounds(steps: list[tuple[str, float]]) -> None:
    shares = FairShare()
    for tenant, seconds in steps:
        shares.charge({tenant: seconds}, {"a", "b"}, seconds)
        assert all(abs(shares.balance(t)) <= LARGEST_BALANCE_S for t in "ab")
        assert 2.0 + (MARGIN * 4.0 - 2.0) / 2 - 1e-9 <= shares.longest_step({"a": 2.0, "b": 3.0}, {}) <= 4.0


@pytest.fixture
async def timed(pair_folder: Path) -> AsyncIterator[tuple[LocalPool, Clock]]:
    """A pool whose forwards take exactly what its step time says."""
    pool = LocalPool.load("pair", pair_config(pair_folder, block_size=8))
    clock = Clock(LinearTime(**TIMES))
    for model in pool.engines.values():
        clock.drive(model)
    yield pool, clock
    await pool.close()
    assert (pool.stats().requests, pool.stats().sequences, pool.stats().used_blocks) == (0, 0, 0)


@pytest.mark.parametrize(("method", "params"), METHODS)
@pytest.mark.parametrize("prompt", [3, 200])
async def test_a_hundred_requests_of_one_tenant_at_most_double_the_latency_of_another(
    timed: tuple[LocalPool, Clock], method: str, params: dict[str, Any], prompt: int
) -> None:
    pool, clock = timed
    call = call_of([9] * prompt, method, params, tenant="b", max_tokens=80, ignore_eos=True)
    alone, beside = await alone_and_beside(pool, clock, call, load(100, method, params, "a"), lambda steps: steps >= 12)
    assert beside <= 2 * alone


async def test_the_other_tenant_goes_on_meanwhile(timed: tuple[LocalPool, Clock]) -> None:
    pool, clock = timed
    crowd = [asyncio.create_task(answer(pool, each)) for each in load(30, "plain", {}, "a")]
    while len(clock.steps) < 12:
        await asyncio.sleep(0)
    before = len(clock.steps)
    await latency(pool, clock, call_of([9, 9], "plain", tenant="b", max_tokens=80, ignore_eos=True))
    steps = clock.steps[before:]
    spent = {"a": 0.0, "b": 0.0}
    for _, feeds in steps:
        for tenant in spent:
            mine = [feed for feed in feeds if feed.table.seq.tenant == tenant]
            spent[tenant] += clock.times.of(mine) if mine else 0.0
    # Measured in steps of its own, the crowd got its half of the time too.
    assert spent["a"] >= 0.45 * (steps[-1][0] - steps[0][0])
    await asyncio.gather(*crowd)
