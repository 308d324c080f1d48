from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lookup.controller import STALE_S, Controller, Decision, FetchQuery, Level, regret
from tests.properties import cases

RAW = 1 << 20
MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def linear(chunks: int, chunk_s: float) -> Callable[[int], float]:
    return lambda done: (chunks - done) * chunk_s


def known(clock: Clock, bandwidth: float, trip_s: float = 0.0) -> Controller:
    """A controller that has measured a link."""
    controller = Controller(clock)
    controller.round_trip(trip_s)
    for _ in range(30):
        controller.received("raw", RAW, RAW, RAW / bandwidth)
    return controller


@dataclass
class Link:
    """A simulated link: bytes take as long as the bandwidth at the time says; time passes on the clock."""

    clock: Clock
    bandwidth: Callable[[float], float]
    sizes: dict[str, int]
    began: float = 0.0
    levels: list[str] = field(default_factory=list)

    def run(self, controller: Controller, chunks: int, chunk_s: float, target_s: float | None) -> float:
        """Fetch as the controller decides, compute the rest; seconds for everything."""
        self.began, done = self.clock.now, 0
        while done < chunks:
            ask = FetchQuery(
                [Level(name, size, chunks - done) for name, size in self.sizes.items()],
                RAW,
                lambda more, done=done: (chunks - done - more) * chunk_s,
                self.clock.now - self.began,
                target_s,
            )
            decision = controller.decide(ask)
            if not decision.chunks:
                break
            size = self.sizes[decision.codec]
            took = size / self.bandwidth(self.clock.now - self.began)
            if took > decision.patience_s:
                self.clock.now += decision.patience_s
                controller.stalled(size, decision.patience_s)
                break
            self.clock.now += took
            controller.received(decision.codec, size, RAW, took)
            self.levels.append(decision.codec)
            done += 1
        self.clock.now += (chunks - done) * chunk_s
        return self.clock.now - self.began


def ask(levels: list[Level], chunks: int, chunk_s: float, **more: float) -> FetchQuery:
    return FetchQuery(levels, RAW, linear(chunks, chunk_s), **more)


def test_a_fast_link_fetches_all_and_a_slow_one_nothing() -> None:
    clock = Clock()
    levels = [Level("raw", RAW, 8)]
    assert known(clock, 1000 * MIB).decide(ask(levels, 8, 0.01)).chunks == 8
    assert known(clock, 10 * MIB).decide(ask(levels, 8, 0.01)).chunks == 0


def test_estimates_are_what_they_say() -> None:
    controller = known(Clock(), 100 * MIB, trip_s=0.002)
    decision = controller.decide(ask([Level("raw", RAW, 4)], 10, 1.0))
    assert decision.chunks == 4
    assert decision.expected_s == pytest.approx(0.002 + 0.04 + 6.0, rel=1e-3)
    assert decision.compute_s == decision.other_s == 10.0


def test_the_head_is_fetched_and_the_tail_computed_where_that_is_fastest() -> None:
    controller = known(Clock(), 100 * MIB)
    seconds = [1.0, 0.5, 0.03, 0.02, 0.015]  # after two chunks, a chunk is computed faster than it is fetched
    decision = controller.decide(FetchQuery([Level("raw", RAW, 4)], RAW, lambda done: seconds[done]))
    assert decision.chunks == 2 or decision.expected_s <= 0.02 + seconds[2]
    assert decision.chunks < 4


def test_no_more_is_fetched_than_the_budget_allows() -> None:
    controller = known(Clock(), 100 * MIB)
    decision = controller.decide(ask([Level("raw", RAW, 10)], 10, 1.0, budget_s=0.055))
    assert decision.chunks == 5
    assert decision.patience_s <= 0.055


def test_decoding_that_is_slower_than_the_link_counts() -> None:
    controller = known(Clock(), 1000 * MIB)
    small = Level("coded", RAW // 8, 10)
    fast = controller.fetch_s(small, 10, RAW)
    controller.decoded("coded", RAW, 0.5)
    assert controller.fetch_s(small, 10, RAW) == pytest.approx(5.0, rel=0.01)
    assert fast < 0.01


def test_what_others_asked_for_is_waited_for_first_but_not_what_is_our_own() -> None:
    controller = known(Clock(), 100 * MIB)
    level = Level("raw", RAW, 1)
    alone = controller.fetch_s(level, 1, RAW)
    controller.queue(10 * RAW)
    assert controller.fetch_s(level, 1, RAW) == pytest.approx(alone + 0.1)
    assert controller.fetch_s(level, 1, RAW, own_bytes=10 * RAW) == pytest.approx(alone)
    controller.queue(-10 * RAW)
    assert controller.fetch_s(level, 1, RAW) == pytest.approx(alone)


def test_quality_is_given_up_only_for_the_target() -> None:
    controller = known(Clock(), 100 * MIB)
    levels = [Level("raw", RAW, 10), Level("eighth", RAW // 8, 10)]
    assert controller.decide(ask(levels, 10, 1.0, target_s=0.2)).codec == "raw"
    assert controller.decide(ask(levels, 10, 1.0, target_s=0.05)).codec == "eighth"
    assert controller.decide(ask(levels, 10, 1.0)).codec == "eighth"


def test_without_a_target_quality_wins_a_tie() -> None:
    controller = known(Clock(), 100 * MIB)
    levels = [Level("raw", RAW, 10), Level("almost", int(0.97 * RAW), 10)]
    assert controller.decide(ask(levels, 10, 1.0)).codec == "raw"


def test_a_cold_start_explores() -> None:
    decision = Controller(Clock()).decide(ask([Level("raw", RAW, 8)], 8, 0.01))
    assert decision.chunks > 0
    assert decision.explores


def test_a_link_that_was_bad_is_tried_again_with_one_chunk_in_the_smallest_form() -> None:
    clock = Clock()
    controller = known(clock, 1 * MIB)
    levels = [Level("raw", RAW, 8), Level("eighth", RAW // 8, 8)]
    assert controller.decide(ask(levels, 8, 0.01)).chunks == 0
    clock.now += STALE_S + 0.1
    decision = controller.decide(ask(levels, 8, 0.01))
    assert (decision.codec, decision.chunks, decision.explores) == ("eighth", 1, True)
    assert decision.patience_s <= 0.08
    controller.received("eighth", RAW // 8, RAW, RAW / 8 / (1000 * MIB))
    assert controller.decide(ask(levels, 8, 0.01)).chunks == 8


def test_a_stalled_link_is_left_at_once() -> None:
    controller = known(Clock(), 1000 * MIB)
    levels = [Level("raw", RAW, 8)]
    assert controller.decide(ask(levels, 8, 0.01)).chunks == 8
    controller.stalled(RAW, 1.0)
    assert controller.decide(ask(levels, 8, 0.01)).chunks == 0


def test_a_sudden_drop_leads_to_a_lower_level() -> None:
    clock = Clock()
    link = Link(clock, lambda t: 200 * MIB if t < 0.05 else 20 * MIB, {"raw": RAW, "eighth": RAW // 8})
    total = link.run(known(clock, 200 * MIB), 40, 0.1, target_s=0.6)
    assert link.levels[0] == "raw"
    assert link.levels[13:18] == ["eighth"] * 5  # soon after the first chunk that came late
    assert total <= 0.6


def test_a_sudden_drop_without_a_lower_level_leads_to_computing() -> None:
    clock = Clock()
    link = Link(clock, lambda t: 200 * MIB if t < 0.05 else 1 * MIB, {"raw": RAW})
    total = link.run(known(clock, 200 * MIB), 40, 0.1, target_s=None)
    assert 5 <= len(link.levels) <= 12
    assert total < 1.1 * 40 * 0.1


def test_a_dead_link_costs_little_more_than_computing() -> None:
    clock = Clock()
    link = Link(clock, lambda t: 200 * MIB if t < 0.01 else 1e-3, {"raw": RAW})
    total = link.run(known(clock, 200 * MIB), 20, 0.05, target_s=None)
    assert total < 1.0 + 0.1


@cases(100)
@given(
    bandwidth=st.floats(1.0, 5000.0),
    chunk_s=st.floats(1e-4, 1.0),
    chunks=st.integers(1, 40),
    ratio=st.integers(2, 16),
    slack=st.floats(1.02, 3.0),
)
def test_the_target_is_met_whenever_any_option_meets_it(
    bandwidth: float, chunk_s: float, chunks: int, ratio: int, slack: float
) -> None:
    clock = Clock()
    sizes = {"raw": RAW, "small": RAW // ratio}
    options = [chunks * chunk_s, *(chunks * size / (bandwidth * MIB) for size in sizes.values())]
    target = slack * min(options)
    link = Link(clock, lambda t: bandwidth * MIB, sizes)
    total = link.run(known(clock, bandwidth * MIB), chunks, chunk_s, target)
    assert total <= target * (1 + 1e-6)


@cases(60)
@given(bandwidth=st.floats(0.5, 5000.0), chunk_s=st.floats(1e-3, 1.0), chunks=st.integers(4, 40))
def test_not_knowing_the_link_costs_a_bounded_part(bandwidth: float, chunk_s: float, chunks: int) -> None:
    clock = Clock()
    link = Link(clock, lambda t: bandwidth * MIB, {"raw": RAW})
    total = link.run(Controller(clock), chunks, chunk_s, None)
    assert total <= 1.6 * chunks * chunk_s + 0.03


def test_regret_is_what_the_best_other_choice_would_have_saved() -> None:
    decision = Decision("raw", 3, 1.0, 0.1, compute_s=2.0, other_s=1.5)
    assert regret(decision, 1.2) == 0.0
    assert regret(decision, 1.8) == pytest.approx(0.3)
    assert regret(decision, 5.0) == pytest.approx(3.5)


def test_computing_because_it_is_faster_is_no_regret() -> None:
    decision = known(Clock(), 1 * MIB).decide(ask([Level("raw", RAW, 8)], 8, 0.01))
    assert decision.chunks == 0
    assert regret(decision, decision.compute_s) == 0.0
