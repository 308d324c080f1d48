"""What sessions keep, until when, and whose are forgotten."""

from __future__ import annotations

from typing import Any

from turnout.config import StickyConfig
from turnout.tenant_lru import Remembered, SessionKey, Sessions
from turnout.types import RouteLimits

DECISION: dict[str, Any] = {"method": "plain", "params": {}, "policy": "static", "version": "0", "reason": "because"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(session: str, tenant: str = "default", **limits: float) -> SessionKey:
    return SessionKey(tenant, session, RouteLimits(**limits))


def test_a_session_is_forgotten_when_its_time_is_over_or_others_need_its_room() -> None:
    clock = Clock()
    sessions = Sessions(StickyConfig(seconds=10, max_sessions=2), clock)
    sessions.remember(key("a"), "r1", DECISION)
    clock.now = 9.0
    assert sessions.recall(key("a")) is not None  # and its time begins anew
    clock.now = 18.0
    assert sessions.recall(key("a")) is not None
    clock.now = 28.0
    assert sessions.recall(key("a")) is None
    for name in ("b", "c", "d"):
        sessions.remember(key(name), "r1", DECISION)
    assert [sessions.recall(key(name)) is not None for name in ("b", "c", "d")] == [False, True, True]


def test_no_tenant_makes_the_sessions_of_another_one_be_forgotten() -> None:
    sessions = Sessions(StickyConfig(max_sessions=6))
    for tenant, count in (("b", 2), ("a", 7), ("c", 1)):
        for number in range(count):
            sessions.remember(key(f"s{number}", tenant, quality=number / 10), "r1", DECISION)

    def kept(tenant: str, count: int) -> list[bool]:
        keys = (key(f"s{number}", tenant, quality=number / 10) for number in range(count))
        return [sessions.recall(each) is not None for each in keys]

    assert kept("b", 2) == [True, True]
    assert kept("c", 1) == [True]
    assert kept("a", 7) == [False] * 4 + [True] * 3


def test_whoever_remembers_a_kept_decision_says_whose_it_was() -> None:
    first, second = Sessions(StickyConfig()), Sessions(StickyConfig())
    first.remember(key("s"), "r1", DECISION)
    kept = first.recall(key("s"))
    assert kept == {
        **DECISION, "reason": "the session keeps what was decided for request r1: because", "kept_from": "r1"
    }  # fmt: skip
    for sessions in (first, second):
        sessions.remember(key("s"), "r2", kept)
        assert sessions.recall(key("s")) == kept
    first.remember(key(""), "r1", DECISION)
    assert first.recall(key("")) is None
    for other in (key("t"), key("s", tenant="other"), key("s", quality=0.5)):
        assert first.recall(other) is None


def test_a_tenants_sessions_are_forgotten_and_give_room() -> None:
    sessions = Sessions(StickyConfig(max_sessions=3))
    for each in (key("a", "gone"), key("b", "gone"), key("c", "kept")):
        sessions.remember(each, "r1", DECISION)
    for tenant in ("gone", "gone", "nobody"):
        sessions.forget(tenant)
    for each in (key("d", "kept"), key("e", "kept")):
        sessions.remember(each, "r1", DECISION)
    kept = [key("a", "gone"), key("b", "gone"), key("c", "kept"), key("d", "kept"), key("e", "kept")]
    assert [sessions.recall(each) is not None for each in kept] == [False, False, True, True, True]


def test_values_are_counted_once_and_the_longest_unused_goes() -> None:
    held: Remembered[str, int] = Remembered(2)
    for number, key in enumerate(("a", "b", "a", "c")):
        held.put("t", key, number)
    assert [held.get("t", key) for key in ("a", "b", "c")] == [2, None, 3]
    assert (held.drop("t", "a"), held.drop("t", "a"), held.get("u", "c")) == (2, None, None)
    held.put("t", "d", 4)
    assert [held.get("t", key) for key in ("c", "d")] == [3, 4]
