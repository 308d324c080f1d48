"""Percentiles, goodput and the void mark, on records worked out by hand."""

from __future__ import annotations

import json

import pytest

from experiments.load.metrics import Objective, percentiles, summarise
from experiments.load.records import LoadResult, Plan, Record

PLAN = Plan("grpc", "a:1", "poisson", 2.0, 4.0, 0, ("p",), "demo", 8)
OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.1)
# Scheduled, sent, first output, last output, tokens.
GOOD = Record(0.0, 0.0, 0.4, 1.2, 9)  # TTFT 0.4, TPOT 0.8 / 8 = 0.1: both just within
LATE = Record(1.0, 1.2, 1.6, 1.7, 2)  # TTFT 0.6 from the schedule, though 0.4 from sending
SLOW = Record(2.0, 2.0, 2.1, 3.0, 7)  # TPOT 0.15
SINGLE = Record(3.0, 3.0, 3.2, 3.2, 1)  # no time between tokens
REFUSED = Record(3.5, 3.5, error="RESOURCE_EXHAUSTED")


def result(client_cpu: float = 0.2, records: tuple[Record, ...] = (GOOD, LATE, SLOW, SINGLE, REFUSED)) -> LoadResult:
    return LoadResult(PLAN, records, client_cpu)


def test_latencies_count_from_the_schedule() -> None:
    assert LATE.ttft_s == pytest.approx(0.6)
    assert LATE.end_to_end_s == pytest.approx(0.7)
    assert GOOD.tpot_s == pytest.approx(0.1)
    assert SINGLE.tpot_s is None
    assert (REFUSED.ttft_s, REFUSED.tpot_s, REFUSED.end_to_end_s) == (None, None, None)


def test_goodput_counts_answers_that_meet_both_limits() -> None:
    assert [OBJECTIVE.met_by(record) for record in (LATE, SLOW, SINGLE, REFUSED)] == [False, False, True, False]
    assert Objective(0.4, 0.1000001).met_by(GOOD)
    assert not Objective(0.39, 0.1000001).met_by(GOOD)
    summary = summarise(result(), Objective(0.5, 0.1000001))
    assert summary.goodput == 2 / 4.0  # GOOD and SINGLE, over a schedule of four seconds
    assert summary.offered == 5 / 4.0


def test_failures_are_counted_by_code_and_not_dropped() -> None:
    records = (GOOD, REFUSED, REFUSED, Record(3.9, 3.9, error="UNFINISHED"))
    summary = summarise(result(records=records), OBJECTIVE)
    assert summary.errors == {"RESOURCE_EXHAUSTED": 2, "UNFINISHED": 1}
    assert (summary.requests, summary.answered) == (4, 1)
    assert summary.requests == summary.answered + sum(summary.errors.values())


def test_tokens_and_lag() -> None:
    summary = summarise(result(), OBJECTIVE)
    assert summary.tokens_per_s == pytest.approx((9 + 2 + 7 + 1) / 3.2)
    assert summary.send_lag_s == pytest.approx(0.2)


def test_percentiles_are_observed_values_by_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentiles(reversed(values)) == {50: 50.0, 90: 90.0, 99: 99.0}
    assert percentiles([3.0, None, 1.0, 2.0]) == {50: 2.0, 90: 3.0, 99: 3.0}
    assert percentiles([None]) == {}


def test_a_busy_client_voids_the_run() -> None:
    assert not summarise(result(client_cpu=0.7), OBJECTIVE).void
    assert summarise(result(client_cpu=0.71), OBJECTIVE).void


def test_a_result_survives_json() -> None:
    assert LoadResult.from_dict(json.loads(json.dumps(result().as_dict()))) == result()
