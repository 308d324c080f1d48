"""The page of a job's speed beside the engine's, from figures made by hand."""

from __future__ import annotations

from experiments.bench_batch_speed import Speed, to_markdown
from experiments.statistics import Interval


def test_a_pair_is_judged_by_the_share_of_the_engines_speed() -> None:
    fast = Speed("dear", 1, Interval(10.0, 9.0, 11.0), Interval(9.6, 9.0, 10.0), Interval(0.96, 0.95, 0.97))
    slow = Speed("cheap", 2, Interval(200.0, 190.0, 210.0), Interval(120.0, 110.0, 130.0), Interval(0.6, 0.5, 0.7))
    page = to_markdown([slow, fast], 3, {"cores": "2"})
    assert (
        "| cheap | 2 | 200.0 [190.0, 210.0] | 120.0 [110.0, 130.0] | 0.60 [0.50, 0.70] | goal at least 0.9: missed |"
        in page
    )
    assert "| dear | 1 | 10.0 [9.0, 11.0] | 9.6 [9.0, 10.0] | 0.96 [0.95, 0.97] | goal at least 0.9: met |" in page
