"""The page of actors beside one process says what was measured, and which goals were met."""

from __future__ import annotations

import os

import pytest

from benchmarks.bench_cluster import DEMO, DRAFTED, Overlapped, page, placed_of, settings
from benchmarks.harness import Turns
from benchmarks.placements.sides import Traffic, Turn
from experiments.stats.intervals import spread


def turn(speed: float, cores: tuple[float, ...]) -> Turn:
    return Turn(100, 100 / speed, cores, 0.5, Traffic(1000, 2000, 300))


@pytest.mark.parametrize(("slower", "verdict"), [(0.8, "yes"), (0.7, "no")])
def test_a_ratio_is_of_one_round_and_is_judged(slower: float, verdict: str) -> None:
    speeds = (50.0, 100.0, 400.0)
    turns = {
        "colocated": [turn(speed, (1.0,)) for speed in speeds],
        "actors": [turn(slower * speed, (0.2, 0.3, 0.5)) for speed in speeds],
    }
    placed = placed_of(DEMO, "all cores", DRAFTED, Turns(turns))
    assert placed.ratio.low == pytest.approx(placed.ratio.high) == pytest.approx(slower)
    assert placed.frugality == pytest.approx(slower)
    assert (placed.bytes_there, placed.bytes_back, placed.bytes_between) == (10, 20, 3)
    overlapped = [Overlapped(DEMO, "all cores", 1, spread([2.0]), spread([3.0]), spread([1.5]), None)]
    text = page(3, 96, [placed], overlapped).markdown()
    row = next(line for line in text.splitlines() if line.startswith("| demo | all cores"))
    assert f"| {verdict} | 1.00 | 0.20, 0.30, 0.50 | {slower:.2f} | 0.50 |" in row
    head = next(line for line in text.splitlines() if line.startswith("| pair | cores"))
    assert head.count("|") == row.count("|")
    assert "| demo | 1 | 2 [2, 2] | 3 [3, 3] | 1.500 [1.500, 1.500] | yes |" in text


def test_both_placements_have_cores_of_this_process() -> None:
    for cores in settings():
        assert cores.coordinator | cores.small | cores.large <= os.sched_getaffinity(0)
        assert cores.threads >= 1
