"""Scheduling decisions on their own: budgets, precedence, atomic tails (seed 239, Sarathi-Serve)."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import Share, plan_step


@dataclass
class Item:
    """An operation as the scheduler sees it."""

    remaining: int
    order: int = 0
    atomic: int = 1
    started: bool = False
    background: bool = False


@st.composite
def items(draw: st.DrawFn) -> Item:
    atomic = draw(st.integers(1, 9))
    background = draw(st.booleans())
    if background:
        atomic = 1
    remaining = atomic + draw(st.sampled_from([0, 0, 1, 3, 30]))
    return Item(remaining, 0, atomic, draw(st.booleans()), background)


@st.composite
def queues(draw: st.DrawFn) -> list[Item]:
    queue = draw(st.lists(items(), max_size=12))
    for item, order in zip(queue, draw(st.permutations(range(len(queue)))), strict=True):
        item.order = order
    return queue


def test_a_prompt_fills_what_decodes_leave() -> None:
    prompt = Item(20, order=0)
    chunks = []
    while prompt.remaining:
        decodes = [Item(1, order=10 + i) for i in range(3)]
        shares = plan_step([prompt, *decodes], token_budget=8, max_batch=64)
        assert shares[:3] == [Share(1, 1), Share(2, 1), Share(3, 1)]
        chunks.append(shares[3].tokens)
        prompt.remaining -= shares[3].tokens
        prompt.started = True
    assert chunks == [5, 5, 5, 5]


def test_precedence_is_decodes_then_begun_then_new_then_background() -> None:
    queue = [
        Item(2, order=0, background=True),
        Item(3, order=1),
        Item(3, order=2, started=True),
        Item(1, order=4),
        Item(5, order=3, atomic=5),
    ]
    shares = plan_step(queue, token_budget=100, max_batch=64)
    assert [share.index for share in shares] == [4, 3, 2, 1, 0]


def test_equal_ranks_go_by_age() -> None:
    queue = [Item(1, order=3), Item(1, order=1), Item(1, order=2)]
    assert [share.index for share in plan_step(queue, 2, 64)] == [1, 2]
    assert [share.index for share in plan_step(queue, 64, 1)] == [1]


def test_an_atomic_tail_is_not_cut() -> None:
    # Catch-up of 4 and a draft of 5: the chunk stops before the draft.
    assert plan_step([Item(9, atomic=5)], 6, 64) == [Share(0, 4)]
    assert plan_step([Item(5, atomic=5)], 3, 64) == [Share(0, 5)]
    assert plan_step([Item(1, order=0), Item(5, order=1, atomic=5)], 3, 64) == [Share(0, 1)]


@given(queues(), st.integers(1, 20), st.integers(1, 8))
def test_a_step_keeps_its_limits(queue: list[Item], budget: int, max_batch: int) -> None:
    shares = plan_step(queue, budget, max_batch)
    assert bool(shares) == bool(queue)
    assert len(shares) <= max_batch
    assert len({share.index for share in shares}) == len(shares)
    if sum(share.tokens for share in shares) > budget:
        assert len(shares) == 1
        assert shares[0].tokens == queue[shares[0].index].atomic
    for share in shares:
        item = queue[share.index]
        assert 0 < share.tokens <= item.remaining
        left = item.remaining - share.tokens
        assert left == 0 or left >= item.atomic


@given(queues(), st.integers(1, 20))
def test_nothing_is_passed_over_that_would_fit(queue: list[Item], budget: int) -> None:
    shares = plan_step(queue, budget, 64)
    left = budget - sum(share.tokens for share in shares)
    planned = {share.index for share in shares}
    for index, item in enumerate(queue):
        if index not in planned:
            assert left <= 0 or (item.remaining <= item.atomic and item.atomic > left)


@given(queues(), st.integers(12, 60))
def test_every_decode_advances_each_step(queue: list[Item], budget: int) -> None:
    decodes = [i for i, item in enumerate(queue) if not item.background and item.remaining == 1]
    for item in queue:
        if not item.background and item.remaining <= item.atomic:
            item.atomic = item.remaining = 1
    shares = plan_step(queue, budget, 64)
    assert set(decodes) <= {share.index for share in shares}
    first = [share.index for share in shares][: len(decodes)]
    assert all(queue[i].remaining == 1 and not queue[i].background for i in first)


@given(queues(), st.integers(1, 20))
def test_background_work_never_takes_from_foreground(queue: list[Item], budget: int) -> None:
    shares = plan_step(queue, budget, 64)
    alone = plan_step([item for item in queue if not item.background], budget, 64)
    foreground = [share for share in shares if not queue[share.index].background]
    assert [share.tokens for share in foreground] == [share.tokens for share in alone]
    kinds = [queue[share.index].background for share in shares]
    assert kinds == sorted(kinds)


@given(queues(), st.integers(1, 12), st.integers(1, 5))
def test_everything_ends_and_the_oldest_decode_is_never_starved(queue: list[Item], budget: int, max_batch: int) -> None:
    steps = 0
    while queue:
        shares = plan_step(queue, budget, max_batch)
        decodes = [item.order for item in queue if not item.background and item.remaining <= item.atomic]
        if decodes:
            assert queue[shares[0].index].order == min(decodes)
        for share in shares:
            queue[share.index].remaining -= share.tokens
            queue[share.index].started = True
        queue = [item for item in queue if item.remaining]
        steps += 1
        assert steps < 1000
