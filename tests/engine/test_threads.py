"""The number of a forward's threads: found by trying, kept while it is best, tried seldom."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.threads import MANY, MARGIN, Fed, Threads

WORK_S = 0.004  # of every forward, as the cost model has it
EIGHT, ONE, MOST = Fed(8, 8), Fed(1, 1), Fed(32, 32)


class Machine:
    """Runs forwards of which it says how long they take with so many threads, and what comes between them."""

    def __init__(self, most: int) -> None:
        self.now = 100.0
        self.threads = Threads(most, lambda: self.now)

    def run(
        self, forwards: int, seconds: dict[int, float], gap_s: float = 0.0005, fed: Fed = EIGHT, model: str = "large"
    ) -> Counter[int]:
        used = Counter[int]()
        for _ in range(forwards):
            number = self.threads.of(model, fed)
            used[number] += 1
            self.now += gap_s + seconds[number]
            self.threads.took(model, fed, WORK_S, seconds[number])
        return used


def test_alone_on_the_machine_all_threads_are_used_and_one_fewer_is_tried_seldom() -> None:
    machine = Machine(4)
    used = machine.run(20_000, {4: 0.004, 3: 0.0055})
    assert set(used) == {3, 4}
    assert used[3] <= 0.015 * used.total()


def test_one_fewer_is_used_where_the_others_take_a_core_and_all_again_when_they_have_gone() -> None:
    machine = Machine(2)
    busy, quiet = {2: 0.009, 1: 0.006}, {2: 0.004, 1: 0.007}
    machine.run(1000, busy)
    assert machine.threads.of("large", EIGHT) == 1
    assert machine.run(5000, busy)[1] >= 4800
    machine.run(16_000, quiet)
    assert machine.run(2000, quiet)[2] >= 1900


def test_what_comes_between_forwards_counts_but_not_having_nothing_to_do() -> None:
    # The front end takes longer to come back where all cores are taken.
    machine = Machine(2)
    for _ in range(4000):
        number = machine.threads.of("large", EIGHT)
        machine.run(1, {2: 0.004, 1: 0.0045}, gap_s={2: 0.004, 1: 0.0005}[number])
    assert machine.threads.of("large", EIGHT) == 1
    # Requests that come one by one say nothing about the threads.
    idle = Machine(2)
    for place in range(4000):
        number = idle.threads.of("large", EIGHT)
        idle.run(1, {2: 0.004, 1: 0.0045}, gap_s=0.5 if place % 2 else 0.0005)
    assert idle.threads.of("large", EIGHT) == 2


def test_models_and_numbers_of_sequences_are_judged_apart() -> None:
    machine = Machine(2)
    for _ in range(40):
        machine.run(100, {2: 0.009, 1: 0.006}, fed=MOST, model="small")
        machine.run(100, {2: 0.004, 1: 0.007}, fed=ONE, model="small")
        machine.run(100, {2: 0.004, 1: 0.007}, fed=MOST, model="large")
    assert [machine.threads.of("small", MOST), machine.threads.of("small", ONE), machine.threads.of("large", MOST)] == [
        1,
        2,
        2,
    ]


def test_forwards_that_compute_are_judged_apart_from_those_that_read_weights() -> None:
    """Where a token each is quicker without the core that others take, a tree of eighty needs every core there is."""
    machine = Machine(2)
    tree = Fed(1, 80)
    for _ in range(40):
        machine.run(100, {2: 0.009, 1: 0.006}, fed=ONE)
        machine.run(100, {2: 0.04, 1: 0.07}, fed=tree)
    assert (machine.threads.of("large", ONE), machine.threads.of("large", tree)) == (1, 2)
    assert Fed(4, 4 * MANY).kind == Fed(5, 5 * 1000).kind != Fed(4, 4).kind


def test_a_small_difference_changes_nothing() -> None:
    machine = Machine(2)
    used = machine.run(20_000, {2: 0.004 * (MARGIN - 0.01), 1: 0.004}, gap_s=0.0)
    assert used[2] >= 0.98 * used.total()


@pytest.mark.parametrize("fed", [ONE, MOST])
def test_a_single_thread_is_never_taken_away(fed: Fed) -> None:
    assert Machine(1).run(5000, {1: 0.004}, fed=fed) == {1: 5000}
