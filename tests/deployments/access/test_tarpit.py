"""Whoever does not wait as it was told is answered late; everybody else at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from deployments.access import tarpit as holding
from deployments.access.tarpit import Tarpit
from turnout.errors import Code, TurnoutError

WAIT_S = 0.2


def refusal(wait_s: float | None = WAIT_S) -> TurnoutError:
    return TurnoutError(Code.RESOURCE_EXHAUSTED, "no", "tenant.concurrency", wait_s)


async def held(keeper: Tarpit, tenant: str, error: TurnoutError) -> float:
    """Seconds it took."""
    began = time.monotonic()
    await keeper.hold(tenant, error)
    return time.monotonic() - began


async def test_whoever_comes_back_too_early_waits_and_others_do_not() -> None:
    keeper = Tarpit()
    assert await held(keeper, "loud", refusal()) < WAIT_S / 2
    late = asyncio.create_task(held(keeper, "loud", refusal()))
    assert await held(keeper, "other", refusal()) < WAIT_S / 2
    assert await late >= WAIT_S * 0.9


async def test_whoever_waits_as_it_was_told_is_answered_at_once() -> None:
    seconds = 0.0
    keeper = Tarpit(lambda: seconds)
    for _ in range(3):
        assert await held(keeper, "a", refusal()) < WAIT_S / 2
        seconds += WAIT_S


async def test_only_those_are_held_who_ask_too_much() -> None:
    keeper = Tarpit()
    for code in (Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.UNAVAILABLE):
        for _ in range(2):
            assert await held(keeper, "a", TurnoutError(code, "no", retry_after_s=60)) < WAIT_S / 2


async def test_a_long_time_to_wait_is_not_waited_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "LONGEST_S", WAIT_S)
    keeper = Tarpit()
    for wait_s in (3600.0, None):  # a pool that has no room does not say when it will
        await keeper.hold(f"a{wait_s}", refusal(wait_s))
        assert WAIT_S * 0.9 <= await held(keeper, f"a{wait_s}", refusal(wait_s)) < 60


async def test_no_more_are_held_than_there_is_room_for_and_those_who_leave_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holding, "MOST_HELD", 2)
    keeper = Tarpit()
    await keeper.hold("a", refusal(60))
    waiting = [asyncio.create_task(keeper.hold("a", refusal(60))) for _ in range(2)]
    await asyncio.sleep(0)
    assert await held(keeper, "a", refusal(60)) < 0.5
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    again = asyncio.create_task(keeper.hold("a", refusal(60)))
    done, _ = await asyncio.wait([again], timeout=WAIT_S)
    assert not done
    again.cancel()
