"""Scheduling decisions on their own: budgets, precedence, atomic tails (seed 239, Sarathi-Serve)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.costs.forward import Forward, attended_positions
from engine.scheduler.fairness import FairShare
from engine.scheduler.limits import Limits, Load, is_decode
from engine.scheduler.policy import Share, plan_step
from tests.engine.step_times import LinearTime


@dataclass
class Item:
    """An operation as the scheduler sees it."""

    remaining: int
    order: int = 0
    atomic: int = 1
    started: bool = False
    background: bool = False
    running: bool = False
    cached: int = 0
    tenant: str = "a"


@st.composite
def items(draw: st.DrawFn) -> Item:
    atomic = draw(st.integers(1, 9))
    background = draw(st.booleans())
    if background:
        atomic = 1
    remaining = atomic + draw(st.sampled_from([0, 0, 1, 3, 30]))
    return Item(remaining, 0, atomic, draw(st.booleans()), background, draw(st.booleans()))


@st.composite
def queues(draw: st.DrawFn) -> list[Item]:
    queue = draw(st.lists(items(), max_size=12))
    for item, order in zip(queue, draw(st.permutations(range(len(queue)))), strict=True):
        item.order = order
    return queue


def decode(order: int = 0, **options: Any) -> Item:
    """A running request that needs one token."""
    return Item(1, order, started=True, running=True, **options)


def test_a_prompt_fills_what_decodes_leave() -> None:
    prompt = Item(20, order=0)
    chunks = []
    while prompt.remaining:
        decodes = [decode(order=10 + i) for i in range(3)]
        shares = plan_step([prompt, *decodes], Limits(8, 64))
        assert shares[:3] == [Share(1, 1), Share(2, 1), Share(3, 1)]
        chunks.append(shares[3].tokens)
        prompt.remaining -= shares[3].tokens
        prompt.started = True
    assert chunks == [5, 5, 5, 5]


def test_precedence_is_decodes_then_catch_up_then_begun_then_new_then_background() -> None:
    queue = [
        Item(2, order=0, background=True),
        Item(3, order=1),
        Item(3, order=2, started=True),
        decode(order=4),
        Item(5, order=3, atomic=5, started=True),
        Item(7, order=6, started=True, running=True),
    ]
    shares = plan_step(queue, Limits(100, 64))
    assert [share.place for share in shares] == [4, 3, 5, 2, 1, 0]


def test_equal_ranks_go_by_age() -> None:
    queue = [Item(1, order=3), Item(1, order=1), Item(1, order=2)]
    assert [share.place for share in plan_step(queue, Limits(2, 64))] == [1, 2]
    assert [share.place for share in plan_step(queue, Limits(64, 1))] == [1]


def test_an_atomic_tail_is_not_cut() -> None:
    # Catch-up of 4 and a draft of 5: the chunk stops before the draft.
    assert plan_step([Item(9, atomic=5)], Limits(6, 64)) == [Share(0, 4)]
    assert plan_step([Item(5, atomic=5)], Limits(3, 64)) == [Share(0, 5)]
    assert plan_step([Item(1, order=0), Item(5, order=1, atomic=5)], Limits(3, 64)) == [Share(0, 1)]


@given(queues(), st.integers(1, 20), st.integers(1, 8))
def test_a_step_keeps_its_limits(queue: list[Item], budget: int, max_batch: int) -> None:
    shares = plan_step(queue, Limits(budget, max_batch))
    assert bool(shares) == bool(queue)
    assert len(shares) <= max_batch
    assert len({share.place for share in shares}) == len(shares)
    if sum(share.tokens for share in shares) > budget:
        assert len(shares) == 1
        assert shares[0].tokens == queue[shares[0].place].atomic
    for share in shares:
        item = queue[share.place]
        assert 0 < share.tokens <= item.remaining
        left = item.remaining - share.tokens
        assert left == 0 or left >= item.atomic


@given(queues(), st.integers(1, 20))
def test_nothing_is_passed_over_that_would_fit(queue: list[Item], budget: int) -> None:
    shares = plan_step(queue, Limits(budget, 64))
    left = budget - sum(share.tokens for share in shares)
    planned = {share.place for share in shares}
    for index, item in enumerate(queue):
        if index not in planned:
            assert left <= 0 or (item.remaining <= item.atomic and item.atomic > left)


@given(queues(), st.integers(12, 60))
def test_every_decode_advances_each_step(queue: list[Item], budget: int) -> None:
    decodes = [i for i, item in enumerate(queue) if is_decode(item)]
    for index in decodes:
        queue[index].atomic = queue[index].remaining = 1
        queue[index].running = True
    shares = plan_step(queue, Limits(budget, 64))
    assert set(decodes) <= {share.place for share in shares}
    first = [share.place for share in shares][: len(decodes)]
    assert all(queue[i].remaining == 1 and not queue[i].background for i in first)


@given(queues(), st.integers(1, 20))
def test_background_work_never_takes_from_foreground(queue: list[Item], budget: int) -> None:
    shares = plan_step(queue, Limits(budget, 64))
    alone = plan_step([item for item in queue if not item.background], Limits(budget, 64))
    foreground = [share for share in shares if not queue[share.place].background]
    assert [share.tokens for share in foreground] == [share.tokens for share in alone]
    kinds = [queue[share.place].background for share in shares]
    assert kinds == sorted(kinds)


@given(queues(), st.integers(1, 12), st.integers(1, 5))
def test_everything_ends_and_the_oldest_decode_is_never_starved(queue: list[Item], budget: int, max_batch: int) -> None:
    steps = 0
    while queue:
        shares = plan_step(queue, Limits(budget, max_batch))
        decodes = [item.order for item in queue if is_decode(item)]
        if decodes:
            assert queue[shares[0].place].order == min(decodes)
        for share in shares:
            queue[share.place].remaining -= share.tokens
            queue[share.place].started = True
        queue = [item for item in queue if item.remaining]
        steps += 1
        assert steps < 1000


def seconds(times: LinearTime, queue: list[Item], shares: list[Share]) -> float:
    """What a step takes."""
    forward = Forward()
    for share in shares:
        forward.add(queue[share.place].cached, share.tokens)
    return forward.seconds(times)


def chunks(times: LinearTime, prompt: int, slowdown: float, decodes: int) -> list[int]:
    """Chunks of a prompt fed beside so many decodes; every step is checked against its limit."""
    found: list[int] = []
    item = Item(prompt, order=99, started=True)
    while item.remaining:
        queue = [item, *(decode(order=1 + i, cached=50) for i in range(decodes))]
        shares = plan_step(queue, Limits(512, 64, slowdown), times)
        alone = seconds(times, queue, shares[:decodes])
        assert [share.place for share in shares[:decodes]] == list(range(1, decodes + 1))
        fed = shares[decodes].tokens
        assert fed == 1 or seconds(times, queue, shares) <= slowdown * alone * (1 + 1e-9)
        found.append(fed)
        item.remaining -= fed
        item.cached += fed
    return found


def test_a_step_beside_decodes_is_bounded_in_time_not_in_tokens() -> None:
    # 3 decodes take 3; 8/3 of that leaves 5 tokens.
    assert chunks(LinearTime(per_token=1.0), 20, 8 / 3, 3) == [5, 5, 5, 5]


def test_a_step_that_nobody_notices_is_not_cut_shorter() -> None:
    times, queue = LinearTime(base=0.0005, per_token=0.0001), [decode(), Item(400, order=1, started=True)]
    assert plan_step(queue, Limits(512, 64)) == [Share(0, 1), Share(1, 400)]
    assert plan_step(queue, Limits(512, 64), times) == [Share(0, 1), Share(1, 4)]
    limits = Limits(512, 64, short_s=0.00501)
    assert plan_step(queue, limits, times) == [Share(0, 1), Share(1, 44)]
    # Where decodes take longer than that by themselves, it changes nothing.
    slow = LinearTime(base=0.05, per_token=0.001)
    assert plan_step(queue, limits, slow) == plan_step(queue, Limits(512, 64), slow)


def test_chunks_shrink_as_a_prompt_attends_to_more() -> None:
    times = LinearTime(base=4.0, per_token=0.05, per_position=1e-4)
    found = chunks(times, 4000, 2.0, 4)
    assert found[:-1] == sorted(found[:-1], reverse=True)
    assert found[0] > 2 * found[-2] > 2


def test_a_prompt_goes_on_though_every_token_of_it_is_too_long() -> None:
    assert chunks(LinearTime(per_token=1.0), 4, 1.5, 1) == [1, 1, 1, 1]


def test_without_decodes_a_prompt_gets_the_whole_budget() -> None:
    queue = [Item(4000, started=True), decode(background=True)]
    assert plan_step(queue, Limits(512, 64), LinearTime()) == [Share(0, 512)]


def test_a_long_catch_up_of_one_request_does_not_stall_the_others() -> None:
    queue = [Item(300, order=0, started=True, running=True), decode(order=1), Item(300, order=2, started=True)]
    shares = plan_step(queue, Limits(512, 64, 2.0), LinearTime(per_token=1.0, base=9.0))
    assert shares == [Share(1, 1), Share(0, 10)]
    assert plan_step([queue[0], queue[2]], Limits(512, 64), LinearTime()) == [Share(0, 300), Share(1, 212)]


def test_decodes_of_another_model_on_the_device_bound_a_prompt_too() -> None:
    queue, times = [Item(400, started=True)], LinearTime(per_token=1.0)
    busy = Load({"a": 30.0}, {"a": 30.0}, False)
    assert plan_step(queue, Limits(512, 64, 2.0), times, neighbours=lambda: [busy]) == [Share(0, 30)]
    both = Load({"a": 30.0}, {"a": 60.0}, True)
    assert plan_step(queue, Limits(512, 64, 2.0), times, neighbours=lambda: [both]) == [Share(0, 15)]


def test_a_step_beside_decodes_elsewhere_is_not_spent_on_a_single_token() -> None:
    queue, times = [Item(400, started=True)], LinearTime(base=4.0, per_token=0.01)
    busy = Load({"a": 1.0}, {"a": 1.0}, False)
    assert plan_step(queue, Limits(512, 64, 1.75), times, neighbours=lambda: [busy]) == [Share(0, 101)]


def test_several_tenants_prompts_go_on_beside_decodes_though_steps_cost_much_to_begin_with() -> None:
    times = LinearTime(base=4.0, per_token=0.1)
    queue = [decode(order=0, tenant="a")]
    queue += [Item(20, order=1 + i, tenant=tenant, started=True, running=True) for i, tenant in enumerate("bcd")]
    shares = plan_step(queue, Limits(512, 64, 1.75), times, owed=FairShare(), contested=True)
    assert [share.place for share in shares] == [0, 1, 2]
    assert min(share.tokens for share in shares[1:]) >= 9


def test_what_has_not_started_is_admitted_in_order_and_only_when_it_would_get_tokens() -> None:
    asked: list[tuple[int, bool]] = []

    def admit(index: int, alone: bool) -> bool:
        asked.append((index, alone))
        return index != 2

    queue = [Item(5, order=3), Item(5, order=1), Item(5, order=2), Item(5, order=4), Item(5, order=5)]
    assert plan_step(queue, Limits(12, 64), admit=admit) == [Share(1, 5), Share(0, 5), Share(3, 2)]
    assert asked == [(1, True), (2, False), (0, False), (3, False)]
    asked.clear()
    plan_step([*queue, decode()], Limits(4, 64), admit=admit)
    assert asked == [(1, False)]


def test_admission_may_shorten_what_is_to_be_fed() -> None:
    queue = [Item(50, order=0), Item(50, order=1)]

    def admit(index: int, alone: bool) -> bool:
        queue[index].remaining, queue[index].cached = 3, 47
        return True

    assert plan_step(queue, Limits(20, 64), admit=admit) == [Share(0, 3), Share(1, 3)]


@given(st.integers(0, 50), st.integers(0, 50))
def test_attended_positions_are_summed_over_fed_tokens(cached: int, fed: int) -> None:
    assert attended_positions(cached, fed) == sum(cached + i + 1 for i in range(fed))


TIMES = st.builds(
    LinearTime,
    base=st.floats(0.1, 30.0),
    per_token=st.floats(0.01, 2.0),
    per_position=st.floats(0.0, 0.01),
)


@given(queues(), TIMES, st.floats(1.1, 4.0), st.integers(1, 600))
def test_no_step_beside_decodes_is_longer_than_the_slowdown_allows(
    queue: list[Item], times: LinearTime, slowdown: float, budget: int
) -> None:
    shares = plan_step(queue, Limits(budget, 64, slowdown), times)
    decodes = [share for share in shares if is_decode(queue[share.place])]
    extra = [share for share in shares if not is_decode(queue[share.place])]
    urgent = [item for item in queue if not item.background]
    running = sum(item.running or is_decode(item) for item in urgent)
    crowding = min(max((len(urgent) - running) / max(running, 1), 1.0), 8.0)
    if decodes and sum(share.tokens for share in extra) > 1:
        most = 1 + (slowdown - 1) * crowding
        assert seconds(times, queue, shares) <= most * seconds(times, queue, decodes) * (1 + 1e-9)
    unbounded = plan_step(queue, Limits(budget, 64, inf), times)
    assert [share for share in unbounded if is_decode(queue[share.place])] == decodes


@pytest.mark.parametrize("prompts", [0, 1])
@pytest.mark.parametrize("base", [0.0, 5.0, 40.0])
@pytest.mark.parametrize(("mine", "theirs"), [(1, 100), (3, 60), (10, 40)])
def test_a_shared_step_is_at_most_twice_what_a_tenant_needs_alone(
    mine: int, theirs: int, base: float, prompts: int
) -> None:
    times = LinearTime(base=base, per_token=1.0, per_position=0.01)
    queue = [decode(order=i, tenant="a", cached=30) for i in range(theirs)]
    queue += [Item(300, order=200 + i, tenant="a", started=True) for i in range(prompts)]
    queue += [decode(order=300 + i, tenant="b", cached=30) for i in range(mine)]
    shares = plan_step(queue, Limits(512, 256, 2.0), times, owed=FairShare(), contested=True)
    own = [share for share in shares if queue[share.place].tenant == "b"]
    assert len(own) == mine
    assert seconds(times, queue, shares) <= 2 * seconds(times, queue, own) * (1 + 1e-9)
    # What is left of the step goes to the other tenant, up to what one more row would exceed.
    rest = sum(share.tokens for share in shares) - mine
    assert rest >= min(theirs, int(seconds(times, queue, own) / 2 / 1.31))


def test_the_share_of_three_tenants_is_a_third() -> None:
    times = LinearTime(per_token=1.0)
    queue = [decode(order=i, tenant=t) for i, t in enumerate("a" * 100 + "b" * 90 + "c" * 10)]
    shares = plan_step(queue, Limits(512, 256, 2.0), times, contested=True)
    fed = Counter(queue[share.place].tenant for share in shares)
    # The step takes 0.9 x 3 x 10; c gets all of its own, the others equal parts of the rest.
    assert (fed["c"], fed.total()) == (10, 27)
    assert abs(fed["a"] - fed["b"]) <= 1


def test_the_end_of_a_prompt_is_no_decode_and_a_draft_is_one() -> None:
    end, first_draft = Item(1, started=True), Item(5, atomic=5, started=True)
    assert (is_decode(end), is_decode(first_draft), is_decode(decode())) == (False, True, True)
    queue = [end, Item(300, order=1)]
    assert plan_step(queue, Limits(512, 64), LinearTime()) == [Share(0, 1), Share(1, 300)]


def test_a_tenant_that_is_owed_time_shares_less_of_its_steps() -> None:
    times, owed = LinearTime(base=0.005, per_token=0.01), FairShare()
    queue = [*(decode(order=i, tenant="a") for i in range(9)), decode(order=10, tenant="b")]
    fed = []
    for _ in range(2):
        shares = plan_step(queue, Limits(512, 64, 2.0), times, owed=owed, contested=True)
        assert Share(9, 1) in shares
        fed.append(len(shares))
        owed.charge({"a": 0.4}, {"a", "b"}, 0.4)
    assert fed == [2, 1]
    prompts = [Item(90, order=0, tenant="a", started=True), Item(9, order=1, tenant="b")]
    first = plan_step(prompts, Limits(512, 64, 2.0), times, owed=owed, contested=True)[0]
    assert first == Share(1, 9)


def test_who_is_owed_time_does_not_stall_requests_that_fit_beside_it() -> None:
    times, owed = LinearTime(base=1.0, per_token=0.1), FairShare()
    owed.charge({"c": 9.0}, {"a", "b", "c"}, 9.0)
    queue = [*(decode(order=i, tenant=tenant) for i, tenant in enumerate("abc")), Item(90, order=9, tenant="d")]
    shares = plan_step(queue, Limits(512, 64, 1.75), times, owed=owed, contested=True)
    assert {share.place for share in shares} >= {0, 1, 2}


@pytest.mark.parametrize("tenants", [2, 4, 8])
@pytest.mark.parametrize("owed_s", [0.0, 5.0])
@pytest.mark.parametrize("base", [0.0, 4.0])
def test_prompts_of_one_tenant_keep_the_slowdown_however_many_others_decode(
    tenants: int, owed_s: float, base: float
) -> None:
    times, owed = LinearTime(base=base, per_token=0.5), FairShare()
    names = [str(i) for i in range(1, tenants)]
    if owed_s:
        owed.charge(dict.fromkeys(names, owed_s), {"0", *names}, owed_s)
        assert owed.owed("0") > 0
    queue = [decode(order=i, tenant=tenant) for i, tenant in enumerate(names)]
    queue.append(Item(4000, order=99, tenant="0", started=True))
    shares = plan_step(queue, Limits(512, 64, 1.75), times, owed=owed, contested=True)
    decodes = [share for share in shares if share.place < len(names)]
    assert len(decodes) == len(names)
    if owed_s:  # whatever a token of it costs
        assert shares[-1].place == len(names), "the prompt is continued"
    if shares[-1].place < len(names) or shares[-1].tokens > 1:
        assert seconds(times, queue, shares) <= 1.75 * seconds(times, queue, decodes) * (1 + 1e-9)
