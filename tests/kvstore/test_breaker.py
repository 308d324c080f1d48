"""The breaker: when it opens, who passes, and that no call waits meanwhile."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import pytest

from kvstore.base import StoreFault
from kvstore.redis.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A breaker with a clock and a probe that are set by hand, and background work kept for later."""

    def __init__(self, errors: int = 3, *, probed: bool = True, jitter: float = 0.0) -> None:
        self.clock = Clock()
        self.good = False
        self.probes = 0
        self.background: list[Callable[[], None]] = []
        self.breaker = Breaker(
            errors,
            1.0,
            probe=self._probe if probed else None,
            clock=self.clock,
            jitter=lambda: jitter,
            in_background=self.background.append,
        )

    def _probe(self) -> bool:
        self.probes += 1
        if not self.good:
            raise StoreFault("unreachable", "still away")
        return True

    def call(self, good: bool) -> None:
        self.breaker.settle(self.breaker.admit(), good)

    def refused(self) -> bool:
        try:
            era = self.breaker.admit()
        except StoreFault as fault:
            return fault.kind == "open"
        self.breaker.settle(era, None)
        return False

    def run_background(self) -> None:
        for work in self.background:
            work()
        self.background.clear()


def test_it_opens_after_errors_in_a_row_and_not_before() -> None:
    bench = Bench(errors=3)
    for good in (False, False, True, False, False):
        bench.call(good)
    assert bench.breaker.state == "closed"  # a success in between starts the count anew
    bench.call(False)
    assert bench.breaker.state == "open"
    assert bench.refused()
    assert bench.breaker.opened == 1


def test_calls_without_an_outcome_change_nothing() -> None:
    bench = Bench(errors=1)
    for _ in range(5):
        bench.breaker.settle(bench.breaker.admit(), None)
    assert bench.breaker.state == "closed"


def test_a_probe_runs_in_the_background_after_the_cooldown_and_no_call_waits_for_it() -> None:
    bench = Bench(errors=1, jitter=0.5)
    bench.call(False)
    bench.clock.now += 1.24  # the cooldown is 1 s and a quarter of jitter
    assert bench.refused()
    assert not bench.background
    bench.clock.now += 0.02
    assert bench.refused()
    assert bench.refused()
    assert len(bench.background) == 1  # one probe however many call
    bench.run_background()
    assert bench.breaker.state == "open"
    assert bench.refused()
    assert not bench.background  # and a cooldown between probes
    bench.clock.now += 1.3
    bench.good = True
    assert bench.refused()
    bench.run_background()
    assert bench.breaker.state == "half-open"
    assert bench.probes == 2


@pytest.mark.parametrize(("good", "then"), [(True, "closed"), (False, "open"), (None, "half-open")])
def test_half_open_lets_one_call_pass_and_its_outcome_decides(good: bool | None, then: str) -> None:
    bench = Bench(errors=3, probed=False)
    for _ in range(3):
        bench.call(False)
    bench.clock.now += 2
    trial = bench.breaker.admit()
    assert bench.refused()
    bench.breaker.settle(trial, good)
    assert bench.breaker.state == then
    assert bench.refused() == (then == "open")


def test_what_began_before_it_opened_says_nothing_about_after() -> None:
    bench = Bench(errors=1)
    slow = bench.breaker.admit()
    bench.call(False)
    bench.breaker.settle(slow, True)
    assert bench.breaker.state == "open"
    bench.clock.now += 2
    bench.good = True
    assert bench.refused()
    bench.run_background()
    trial = bench.breaker.admit()
    bench.breaker.settle(slow, False)
    assert bench.breaker.state == "half-open"
    bench.breaker.settle(trial, True)
    assert bench.breaker.state == "closed"


def test_wake_starts_a_due_probe_though_nobody_calls() -> None:
    bench = Bench(errors=1)
    bench.breaker.wake()
    bench.call(False)
    bench.breaker.wake()
    assert not bench.background
    bench.clock.now += 2
    bench.breaker.wake()
    bench.breaker.wake()
    assert len(bench.background) == 1


def test_being_refused_costs_microseconds() -> None:
    bench = Bench(errors=1)
    bench.call(False)
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        assert bench.refused()
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 1e-3


def test_many_threads_get_one_trial_between_them() -> None:
    bench = Bench(errors=1, probed=False)
    bench.call(False)
    bench.clock.now += 2
    passed: list[int] = []
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        try:
            passed.append(bench.breaker.admit())
        except StoreFault:
            return

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passed) == 1


@pytest.mark.parametrize(("errors", "cooldown"), [(0, 1.0), (1, 0.0), (-1, 1.0)])
def test_senseless_settings_are_refused(errors: int, cooldown: float) -> None:
    with pytest.raises(ValueError, match="at least one error"):
        Breaker(errors, cooldown)
