"""The concurrency limiter of a pool: who gets the next place, who waits, who is refused, and that none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.concurrency import ConcurrencyLimiter
from turnout.errors import Code, Interrupted, TurnoutError


class Desk:
    """Calls that hold their place until they are told to go."""

    def __init__(self, limit: int, max_waiting: int = 1000) -> None:
        self.places = ConcurrencyLimiter("pool", limit, max_waiting)
        self.inside: list[str] = []
        self._doors: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def come(self, name: str, deadline_s: float | None = None, stays: bool = False, rank: int = 0) -> None:
        """A call whose tenant is the first letter of its name."""
        self._doors[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, deadline_s, stays, rank))

    async def _stay(self, name: str, deadline_s: float | None, stays: bool, rank: int) -> None:
        async with self.places.hold(name[0], deadline_s, stays, rank):
            self.inside.append(name)
            try:
                await self._doors[name].wait()
            finally:
                self.inside.remove(name)

    async def go(self, name: str) -> None:
        self._doors[name].set()
        await self.tasks[name]
        await settle()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (self.places.num_held, self.places.num_waiting) == (0, 0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def opened(limit: int, names: str, max_waiting: int = 1000) -> Desk:
    desk = Desk(limit, max_waiting)
    for name in names.split():
        desk.come(name)
        await settle()
    return desk


async def test_calls_beyond_the_limit_wait_in_order() -> None:
    desk = await opened(2, "a1 a2 a3 a4")
    assert (desk.inside, desk.places.num_held, desk.places.num_waiting) == (["a1", "a2"], 2, 2)
    await desk.go("a2")
    assert desk.inside == ["a1", "a3"]
    await desk.close()


async def test_the_101st_call_of_one_tenant_does_not_stand_before_the_first_of_another() -> None:
    desk = await opened(8, " ".join(f"a{i}" for i in range(101)))
    desk.come("b0")
    await settle()
    assert "b0" in desk.inside
    assert len(desk.inside) == 9
    await desk.close()


async def test_a_tenant_gets_its_equal_share_at_once_and_no_more() -> None:
    desk = await opened(4, "a1 a2 a3 a4 a5 b1 b2 b3 c1 c2")
    # With two tenants a share is 2 places; with three it is 1.
    assert desk.inside == ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    for name in ("a1", "a2", "a3"):
        await desk.go(name)
    assert desk.inside == ["a4", "b1", "b2", "c1"]
    await desk.go("b1")
    assert desk.inside == ["a4", "b2", "c1", "a5"]  # all hold one; a was served least recently
    await desk.go("c1")
    assert desk.inside == ["a4", "b2", "a5", "c2"]
    await desk.go("c2")
    assert Counter(name[0] for name in desk.inside) == {"a": 2, "b": 2}
    await desk.close()


async def test_overtaking_ends_at_twice_the_limit() -> None:
    desk = await opened(2, "a1 a2 b1 c1 d1 e1")
    assert desk.inside == ["a1", "a2", "b1", "c1"]
    await desk.go("a1")
    assert desk.inside == ["a2", "b1", "c1", "d1"]
    await desk.close()


async def test_a_full_queue_refuses_who_fills_it() -> None:
    desk = await opened(1, "a1 a2 a3 a4", max_waiting=3)
    with pytest.raises(TurnoutError, match="pool 'pool' has no room for another request") as caught:
        async with desk.places.hold("a"):
            pass
    assert (caught.value.code, caught.value.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 1.0)
    desk.come("b1")
    desk.come("b2")
    await settle()
    assert desk.inside == ["a1", "b1"]
    assert desk.places.num_waiting == 4
    await desk.close()


async def test_waiting_ends_at_the_deadline() -> None:
    desk = await opened(1, "a1")
    desk.come("a2", 0.01)
    with pytest.raises(TurnoutError, match=r"deadline_s: 0\.01 s have passed") as caught:
        await desk.tasks["a2"]
    assert (caught.value.code, caught.value.field) == (Code.DEADLINE_EXCEEDED, "deadline_s")
    assert desk.places.num_waiting == 0
    await desk.close()


async def test_a_place_given_to_who_leaves_in_the_same_moment_is_passed_on() -> None:
    desk = await opened(1, "a1 a2 a3")
    desk._doors["a1"].set()
    while desk.places._held.get("a") and desk.places.num_waiting == 2:
        await asyncio.sleep(0)
    desk.tasks["a2"].cancel()
    await settle()
    assert desk.inside == ["a3"]
    await desk.close()


async def test_who_came_last_in_the_longest_queue_is_sent_away_first() -> None:
    desk = await opened(1, "a1 a2 a3 a4")
    desk.come("a5", stays=True)
    desk.come("b1")  # has its share at once
    desk.come("b2")
    await settle()
    assert desk.inside == ["a1", "b1"]
    assert desk.places.send_away(2) == 2
    await settle()
    gone = [name for name, task in desk.tasks.items() if task.done()]
    assert gone == ["a3", "a4"]
    for name in gone:
        with pytest.raises(Interrupted) as caught:
            await desk.tasks[name]
        assert caught.value.moved is not None  # what is moved is tried again at once
    assert desk.places.send_away(9) == 2  # a5 stays
    await settle()
    assert desk.places.num_waiting == 1
    await desk.go("a1")
    assert "a5" in desk.inside
    await desk.close()


async def test_who_is_sent_away_and_leaves_in_the_same_moment_takes_nobodys_place() -> None:
    desk = await opened(1, "a1 a2 a3")
    assert desk.places.send_away(1) == 1
    desk.tasks["a3"].cancel()
    await settle()
    assert (desk.places.num_held, desk.places.num_waiting) == (1, 1)
    await desk.go("a1")
    assert desk.inside == ["a2"]
    await desk.close()


def steps() -> st.SearchStrategy[list[tuple[str, str]]]:
    return st.lists(
        st.tuples(st.sampled_from(["come", "come", "go", "cancel", "send"]), st.sampled_from("abc")), max_size=40
    )


@given(steps(), st.integers(1, 4))
def test_no_place_is_lost_or_left_empty(steps: list[tuple[str, str]], limit: int) -> None:
    async def run() -> None:
        desk = Desk(limit)
        for number, (action, tenant) in enumerate(steps):
            mine = [name for name, task in desk.tasks.items() if name[0] == tenant and not task.done()]
            if action == "come":
                desk.come(f"{tenant}{number}")
            elif action == "send":
                before = desk.places.num_waiting
                assert desk.places.send_away(2) == min(2, before)
            elif mine and action == "go":
                desk._doors[mine[-1]].set()
            elif mine:
                desk.tasks[mine[-1]].cancel()
            await settle()
            held, waiting = desk.places.num_held, desk.places.num_waiting
            assert held == len(desk.inside) <= 2 * limit
            assert held + waiting == sum(not task.done() for task in desk.tasks.values())
            assert held >= min(limit, held + waiting)
        await desk.close()

    asyncio.run(run())


async def test_within_a_tenant_the_lowest_rank_is_first_and_other_tenants_lose_nothing() -> None:
    desk = await opened(1, "a1")
    for name, rank in (("a2", 5), ("a3", 0), ("a4", -1), ("a5", 0), ("a6", 5), ("b1", 9), ("c1", -9)):
        desk.come(name, rank=rank)
        await settle()
    served = list(desk.inside)
    while desk.inside:
        name = desk.inside[0]
        await desk.go(name)
        served += [each for each in desk.inside if each not in served]
    assert [name for name in served if name[0] == "a"] == ["a1", "a4", "a3", "a5", "a2", "a6"]
    assert {"b1", "c1"} <= set(served[:4])
    assert desk.places._ranks == {}
    await desk.close()
