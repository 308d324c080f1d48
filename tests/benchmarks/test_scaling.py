"""The simulator against closed forms, and what it must not get wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from pydantic import ValidationError

from benchmarks.scaling.closed_forms import front_bound, md1_wait, plain_rate
from benchmarks.scaling.cluster import Cluster, Layout, Traffic, controller_cores
from benchmarks.scaling.costs import Choice, Control, Costs, Forward, Hop, Link, Pair, Way, Work, load
from benchmarks.scaling.kernel import Clock, Station
from benchmarks.scaling.page import page
from benchmarks.scaling.sweep import check, saturates_at, sweep

NOTHING = Work(request_s=0.0, chunk_s=0.0)
COSTS = Costs(
    pair=Pair(
        small=Forward(base=1e-3, slopes=(2e-5,)),
        large=Forward(base=3e-3, slopes=(1e-4,), per_attended=1e-8),
        step_s=5e-4,
        row_s=2e-5,
        kv_bytes=2e4,
        cache_tokens=4096,
    ),
    way=Way(draft=0, acceptance=0.7),
    hop=Hop(transit_s=1e-3, coordinator_s=2e-4),
    transfer=Link(latency_s=1e-3, bytes_per_s=1e9),
    proxy=NOTHING,
    ingress=NOTHING,
    replica=NOTHING,
    control=Control(idle=0.05, per_replica=0.01, stats_bytes=3000, stats_period_s=1.0, byte_s=1e-9),
    choice=Choice(base_s=0.0, per_replica_s=0.0, hear_s=0.0),
    store=Link(latency_s=2e-4, bytes_per_s=1.25e9),
)
FIXED = Traffic(prompt=64, answer=32, spread=0.0)
ONE = Layout("one")


def changed(**parts: object) -> Costs:
    return COSTS.model_copy(update=parts)


@pytest.mark.parametrize("load_", [0.3, 0.7])
def test_waiting_is_as_in_a_queue_with_constant_service(load_: float) -> None:
    clock, random, service_s = Clock(), Random(1), 0.01
    station = Station(clock)
    waits: list[float] = []

    def come() -> None:
        waits.append(station.backlog_s)
        station.serve(service_s, lambda: None)
        clock.after(random.expovariate(load_ / service_s), come)

    come()
    clock.run(600.0)
    assert sum(waits) / len(waits) == pytest.approx(md1_wait(load_ / service_s, service_s), rel=0.05)
    assert station.busy_s / 600.0 == pytest.approx(load_, rel=0.03)
    with pytest.raises(ValueError, match="below 1"):
        md1_wait(100.0, 0.01)


def test_one_request_after_the_other_takes_the_sum_of_its_steps() -> None:
    figures = Cluster(COSTS, ONE, 1, FIXED).closed(1, 20.0)
    assert figures.tokens_per_s == pytest.approx(plain_rate(COSTS, 64, 32), rel=0.02)


def test_together_they_share_steps_and_a_hop_makes_one_longer() -> None:
    alone, together = (Cluster(COSTS, ONE, 1, FIXED).closed(count, 10.0).tokens_per_s for count in (1, 16))
    assert 4 * alone < together < 16 * alone
    drafting = changed(way=Way(draft=4, acceptance=0.7))
    near, far = (Cluster(drafting, ONE, 1, FIXED, split).closed(1, 10.0).tokens_per_s for split in (False, True))
    assert far < near  # alone, there is nothing to overlap with
    # 4 MB at 1 GB/s and 1 ms before each round of drafts: longer than half a hop.
    judged = changed(way=Way(draft=4, acceptance=0.7, draft_bytes=1e6))
    slower = Cluster(judged, ONE, 1, FIXED, True).closed(1, 10.0).tokens_per_s
    rounds = 32 / sum(0.7**accepted for accepted in range(5))
    assert 32 / slower - 32 / far == pytest.approx(rounds * (5e-3 - 0.5e-3), rel=0.1)


def test_certain_drafts_are_all_accepted_and_impossible_ones_never() -> None:
    rates = []
    for acceptance in (0.0, 1.0):
        costs = changed(way=Way(draft=3, acceptance=acceptance))
        figures = Cluster(costs, ONE, 1, FIXED).closed(1, 10.0)
        rates.append(figures.busy["large device"] and figures.tokens_per_s)
    small, large, pair = COSTS.pair.small.times(), COSTS.pair.large.times(), COSTS.pair
    round_s = 3 * (small.seconds(1, 80, 1) + pair.step_s + pair.row_s)
    round_s += large.seconds(4, 4 * 80, 1) + pair.step_s + pair.row_s
    assert rates[0] == pytest.approx(1 / round_s, rel=0.05)
    assert rates[1] == pytest.approx(4 / round_s, rel=0.15)


def test_a_single_bottleneck_carries_what_the_bound_says() -> None:
    costs = changed(ingress=Work(request_s=4e-3, chunk_s=1e-3))
    pieces = 4.0
    figures = Cluster(costs, ONE, 16, FIXED).closed(16, 20.0)
    items = (figures.busy["ingress"] / figures.requests_per_s - 4e-3) / 1e-3
    assert figures.busy["ingress"] > 0.98
    assert 2 < items < 32
    assert figures.requests_per_s == pytest.approx(front_bound(costs, ONE, 16, items)["ingress"], rel=0.03)
    spread = Layout("many", pools_per_ingress=2)
    assert front_bound(costs, spread, 16, pieces)["ingress"] == 8 * front_bound(costs, ONE, 16, pieces)["ingress"]


@pytest.mark.drivers
def test_a_slice_stands_for_all() -> None:
    costs = changed(ingress=Work(request_s=2e-3, chunk_s=2e-4), way=Way(draft=3, acceptance=0.6))
    for layout in (ONE, Layout("many", pools_per_ingress=8)):
        whole, part = (Cluster(costs, layout, 32, FIXED, most=most).closed(8, 8.0) for most in (32, 8))
        assert part.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.06)
        assert part.busy["ingress"] == pytest.approx(whole.busy["ingress"], rel=0.08)


def test_what_choosers_hear_can_fill_them() -> None:
    costs = changed(
        ingress=Work(request_s=1e-3, chunk_s=0.0), choice=Choice(base_s=0.0, per_replica_s=0.0, hear_s=2e-3)
    )
    assert front_bound(costs, ONE, 8, 1.0)["ingress"] == pytest.approx(1000 * (1 - 8 * 2e-3))
    busy = costs.model_copy(update={"control": COSTS.control.model_copy(update={"per_replica": 0.0})})
    assert front_bound(busy, ONE, 600, 1.0)["ingress"] == 0.0


def test_prefixes_gather_where_the_choice_knows_them_and_a_hot_one_spreads() -> None:
    traffic = Traffic(prompt=32, answer=16, shared=512, prefixes=6, sharing=1.0, hot=0.3)
    costs = changed(pair=COSTS.pair.model_copy(update={"large": Forward(base=3e-3, slopes=(4e-4,))}))
    knowing, blind = (
        Cluster(costs, replace(ONE, aware=aware), 4, traffic, seed=3).open(4.0, 40.0) for aware in (True, False)
    )
    assert knowing.hits > blind.hits + 0.1
    assert knowing.ttft_s[1] < blind.ttft_s[1]
    assert knowing.busiest < 1.6  # 30% have one prefix: alone it would be 1.2 of a pool's, beside its own part


def test_a_store_spares_computing_what_another_pool_has() -> None:
    traffic = Traffic(prompt=32, answer=16, shared=512, prefixes=20, sharing=1.0)
    layouts = (Layout("without", aware=False), Layout("with", aware=False, pools_per_store=8))
    without, stored = (Cluster(COSTS, layout, 8, traffic).open(4.0, 20.0) for layout in layouts)
    assert stored.hits > without.hits + 0.2
    assert 0 < stored.busy["store"] < 0.5


def test_cells_bound_what_a_controller_has_to_do() -> None:
    cells = Layout("cells", pools_per_ingress=8, cell=64)
    assert controller_cores(COSTS, cells, 4096) == controller_cores(COSTS, cells, 64)
    open_ended = replace(cells, cell=None)
    few, many = (controller_cores(COSTS, open_ended, pools) for pools in (512, 1024))
    assert many > 2 * few  # what it sends grows with pools times ingress processes


def test_a_sweep_finds_where_one_ingress_is_full() -> None:
    costs = changed(ingress=Work(request_s=1e-2, chunk_s=2e-3))
    layouts = (ONE, Layout("many", pools_per_ingress=1))
    points = sweep(costs, layouts, (1, 8), seconds=3.0)
    full = saturates_at(points, "one")
    assert full is not None
    assert (full.pools, full.saturated) == (8, "ingress")
    assert points[3].share > 1.5 * points[1].share
    assert points[3].saturated == ""
    assert "Full is: ingress" in page(costs, check(costs), points).markdown()


def test_the_shipped_costs_can_be_read_and_bad_ones_are_named(tmp_path: Path) -> None:
    costs = load()
    assert costs.observed
    assert all(abs(each.error) < 0.5 for each in check(costs, 3.0) if each.observed.fitted)
    bad = tmp_path / "costs.json"
    bad.write_text(costs.model_dump_json().replace('"hop"', '"hops"'))
    with pytest.raises(ValidationError, match="hop"):
        load(bad)
