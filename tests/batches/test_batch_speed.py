"""The page of a job's speed beside the engine's, from figures made by hand."""

from __future__ import annotations

from benchmarks.bench_batch_speed import Speed, page
from experiments.stats.intervals import Interval


def speed(pair: str, actors: int, *values: float) -> Speed:
    return Speed(pair, actors, *(Interval(value, 0.9 * value, 1.1 * value) for value in values))


def test_a_pair_is_judged_by_the_share_of_the_engines_speed_with_the_same_settings() -> None:
    slow, fast = speed("cheap", 2, 200.0, 150.0, 120.0, 0.6), speed("dear", 1, 10.0, 8.0, 11.0, 1.1)
    text = page([slow, fast], 3).markdown()
    cheap, dear = (line for line in text.splitlines() if line.startswith(("| cheap", "| dear")))
    assert cheap.startswith("| cheap | 2 | 200.0 [180.0, 220.0] | 150.0 [135.0, 165.0] | 120.0 [108.0, 132.0] | 0.60 [")
    assert cheap.endswith("| goal at least 0.9: missed |")
    assert dear.startswith("| dear | 1 | 10.0 [9.0, 11.0] | 8.0 [7.2, 8.8] | 11.0 [9.9, 12.1] | 1.10 [")
    assert dear.endswith("| goal at least 0.9: met |")
