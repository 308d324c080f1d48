"""What is counted of requests and of pools: values, units, and labels that no caller can make up."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decoding.methods.speculative import SpeculativeParams
from deployments.fan_out import combine
from deployments.metrics import DEEPEST, DRAFTERS, MOST_DRAFTING, MOST_DRAFTS, OTHER, Metrics, Times, drafter_of
from deployments.openai_format import usage_object
from deployments.telemetry import process_metrics
from deployments.telemetry.catalogue import ALL, CONVENTIONS, COUNTED, READ
from deployments.telemetry.monotonic_counters import MOST_PROCESSES, Growing
from tests.deployments.in_process import make_config
from turnout.calls import DriftReading, Usage
from turnout.cost import Cost, CostReport, ModelMeter, SpeculationMeter
from turnout.errors import TurnoutError, invalid
from turnout.pool_stats import AuditDiff, AuditStats, MemberStats, PoolStats
from turnout.telemetry_config import SloConfig

USAGE = Usage(
    30, 11, 20,
    {
        "small": ModelMeter(10, forwards=4, decode_tokens=6, draft_tokens=9, generated_tokens=7, discarded_tokens=2),
        "large": ModelMeter(
            40, forwards=3, prompt_tokens=10, cached_tokens=20, catchup_tokens=1, generated_tokens=4, discarded_tokens=1
        ),
    },
    SpeculationMeter(3, 11, 9, 7, [3, 3, 3], [3, 3, 1], 0.25, 0.5), 2,
    CostReport(Cost(0.5, 100.0, 0.8), Cost(1.0, 400.0, 1.6), 4 / 11), "speculative", {}, 1, 0.2, 1.2,
    queue_s=0.3,
)  # fmt: skip
MEMBER = MemberStats("large", 2, 30, 50, 100, 3, 40, 0.02, "here", 1)
POOL = PoolStats(
    4, 2, 30, 50, 100, 3, 12.5, {}, shadows=1, shadows_dropped=2, members=(MEMBER,), waiting_s=0.7, place="a pid 1",
    batch_requests=5, log_dropped=7, audit=AuditStats(equal=6, ties=1, mismatches=0, dropped=2, failed=0, tokens=70),
)  # fmt: skip


def values(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """By name, and the values of labels in the order of their names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_answers_written_side_by_side_take_each_tokens_time_together() -> None:
    took = []
    for answers in 1, 2:
        metrics = Metrics()
        metrics.used("demo", "default", USAGE, Times(0.6, 2.0, answers))
        took.append(values(metrics)["turnout_tpot_seconds_sum"]["demo",])
    seconds, tokens = USAGE.wall_s - USAGE.ttft_s, USAGE.completion_tokens
    assert took == pytest.approx([seconds / (tokens - 1), seconds / (tokens / 2 - 1)])


def test_an_answer_is_counted_in_all_its_parts() -> None:
    metrics = Metrics()
    metrics.finished("demo", "OK")
    metrics.used("demo", "default", USAGE, Times(0.6, 2.0), large="large")
    found = values(metrics)
    assert found["turnout_requests_total"] == {("demo", "OK"): 1}
    assert found["turnout_generated_tokens_total"] == {("small",): 7, ("large",): 4}
    work = found["turnout_model_tokens_total"]  # by kind, method, model
    assert work[("draft", "speculative", "small")] == 9
    assert work[("cached", "speculative", "large")] == 20
    assert ("draft", "speculative", "large") not in work
    assert found["turnout_forwards_total"] == {("speculative", "small"): 4, ("speculative", "large"): 3}
    assert found["turnout_prompt_tokens_total"] == {("demo",): 30}
    assert found["turnout_cached_tokens_total"] == {("demo",): 20}
    assert found["turnout_completion_tokens_total"] == {("speculative", "demo"): 11}
    assert found["turnout_large_tokens_total"] == {("speculative", "demo"): 5}  # one of them was dropped
    assert found["turnout_switches_total"] == {("speculative", "demo"): 2}
    assert found["turnout_cost_flops_total"] == {("demo", "spent"): 100, ("demo", "large_only"): 400}
    assert found["turnout_cost_paper_tokens_total"] == {("demo", "spent"): 5.5, ("demo", "large_only"): 11}
    assert found["turnout_cost_wall_seconds_total"] == {("demo", "spent"): 0.8, ("demo", "large_only"): 1.6}
    assert found["turnout_draft_round_tokens_total"] == {("own", "speculative", "default"): 11}
    assert found["turnout_tenant_tokens_total"] == {
        ("prompt", "default"): 30, ("cached", "default"): 20, ("completion", "default"): 11
    }  # fmt: skip
    for name, seconds in (("ttft", 0.6), ("request", 2.0), ("queue", 0.3), ("tpot", 0.1)):
        assert found[f"turnout_{name}_seconds_sum"] == {("demo",): pytest.approx(seconds)}


def test_acceptance_is_counted_by_position_and_deep_drafts_together() -> None:
    metrics = Metrics()
    deep = SpeculationMeter(4, 40, 80, 40, [4] * 20, [4] * 10 + [0] * 10, 0.1, 0.1)
    metrics.used("demo", "default", replace(USAGE, speculation=deep))
    found = values(metrics)
    reached = {depth: count for (depth, *_), count in found["turnout_draft_depth_rounds_total"].items()}
    assert reached == {**{str(depth): 4 for depth in range(15)}, "15+": 20}
    kept = {depth: count for (depth, *_), count in found["turnout_accepted_depth_rounds_total"].items()}
    assert kept == {str(depth): 4 for depth in range(10)}


def test_what_drafts_are_worth_can_be_asked_for_each_tenant() -> None:
    metrics = Metrics()
    metrics.known_tenant = lambda name: name in ("acme", "quiet")
    for tenant, kept in (("acme", 6), ("quiet", 2)):
        drafts = SpeculationMeter(4, 4 + kept, 8, kept, [4, 4], [kept - kept // 2, kept // 2], 0.3, 0.1 * kept)
        metrics.used("demo", tenant, replace(USAGE, speculation=drafts))
    found = values(metrics)

    def of(name: str, *labels: str) -> float:
        return found[f"turnout_{name}_total"][labels]

    for tenant, tokens, share, first in (("acme", 2.5, 1 / 3, 0.75), ("quiet", 1.5, 0.6, 0.25)):
        at = ("own", "speculative", tenant)
        assert of("draft_round_tokens", *at) / of("draft_rounds", *at) == tokens
        spent = of("draft_seconds", *at), of("verify_seconds", *at)
        assert spent[0] / sum(spent) == pytest.approx(share)
        assert of("accepted_depth_rounds", "0", *at) / of("draft_depth_rounds", "0", *at) == first


def test_two_tenants_and_two_drafters_are_told_apart_in_one_scrape() -> None:
    metrics = Metrics()
    metrics.known_tenant = lambda name: name in ("acme", "quiet")
    cases = [("acme", "copyspec", 6), ("acme", "medusa", 4), ("quiet", "copyspec", 2), ("quiet", "medusa", 0)]
    for tenant, drafter, kept in cases:
        drafts = SpeculationMeter(8, 8 + kept, 8, kept, [8], [kept] if kept else [], 0.3, 0.1)
        params = {"drafter": drafter, "verifier": "match"}
        metrics.used("demo", tenant, replace(USAGE, params=params, speculation=drafts))
    found = values(metrics)
    accepted, reached = found["turnout_accepted_draft_tokens_total"], found["turnout_draft_depth_rounds_total"]
    assert accepted == {(drafter, "speculative", tenant): kept for tenant, drafter, kept in cases}
    assert reached == {("0", drafter, "speculative", tenant): 8 for tenant, drafter, _ in cases}


@pytest.mark.parametrize(
    ("params", "drafter"),
    [
        ({"drafter": "copyspec"}, "copyspec"),
        ({"drafter": {"name": "sequoia", "ranks": 4}}, "sequoia"),
        ({"drafter": "none"}, "none"),
        ({"drafter": [{"drafter": "copyspec", "length": None, "nodes": None}]}, "several"),
        ({"inner": {"name": "speculative", "drafter": "aded"}}, "aded"),
        ({"speculate": {"drafter": "medusa"}, "scorer": "self_grade"}, "medusa"),
        ({"speculate": None}, "own"),
        ({}, "own"),
        ({"drafter": "made-up"}, "other"),
        ({"drafter": {"name": [5]}}, "other"),
    ],
    ids=str,
)
def test_who_drafts_is_one_of_a_closed_set(params: dict[str, Any], drafter: str) -> None:
    assert drafter_of(params) == drafter


def test_the_parameters_a_request_ran_with_tell_the_drafter() -> None:
    cases: list[tuple[Any, str]] = [
        ("copyspec", "copyspec"),
        ({"name": "aded", "rate": 0.5}, "aded"),
        (["copyspec", "aded"], "several"),
    ]
    for given, drafter in cases:
        assert drafter_of(SpeculativeParams.model_validate({"drafter": given}).model_dump(mode="json")) == drafter


def test_tenants_who_try_every_drafter_make_a_bounded_number_of_series() -> None:
    metrics = Metrics()
    metrics.known_tenant = lambda name: name.startswith("t")
    drafters = sorted(DRAFTERS)
    for number in range(MOST_DRAFTING):
        for drafter in drafters:
            metrics.used("demo", f"t{number}", replace(USAGE, params={"drafter": drafter}))
            metrics.used("demo", f"t{number}", replace(USAGE, method="monitored", params={"drafter": drafter}))
    rounds = values(metrics)["turnout_draft_rounds_total"]
    assert len(rounds) <= MOST_DRAFTS + 2 * len(drafters)
    assert sum(rounds.values()) == 2 * 3 * MOST_DRAFTING * len(drafters)
    assert {labels[0] for labels in rounds} == set(drafters)


@pytest.mark.parametrize(
    ("times", "good", "missed"),
    [
        (Times(0.4, 2.0), 1, {"ttft": 0, "tpot": 0}),
        (Times(0.6, 2.0), 0, {"ttft": 1, "tpot": 0}),
    ],
)
def test_goodput_counts_answers_that_keep_every_goal(times: Times, good: int, missed: dict[str, int]) -> None:
    metrics = Metrics(SloConfig(ttft_s=0.5, tpot_s=0.11))
    metrics.used("demo", "default", USAGE, times)
    found = values(metrics)
    assert found["turnout_good_requests_total"] == {("demo",): good}
    assert {goal: count for (_, goal), count in found["turnout_slo_missed_total"].items()} == missed
    slow = Metrics(SloConfig(ttft_s=0.5, tpot_s=0.09))
    slow.used("demo", "default", USAGE, times)
    assert values(slow)["turnout_good_requests_total"] == {("demo",): 0}


def test_only_known_tenants_have_series_of_their_own() -> None:
    metrics = Metrics()
    metrics.known_tenant = lambda name: name == "acme"
    for tenant in ("acme", "made-up-1", "made-up-2"):
        metrics.finished("demo", "OK", tenant)
        metrics.used("demo", tenant, USAGE)
    found = values(metrics)
    assert found["turnout_tenant_requests_total"] == {("OK", "acme"): 1, ("OK", "other"): 2}
    assert {labels[-1] for labels in found["turnout_draft_tokens_total"]} == {"acme", "other"}


def test_a_thousand_tenants_make_a_bounded_number_of_series() -> None:
    """Whatever they draft, and however deep; what no series of its own tells is in those of all others."""
    tenants, methods, depth = 1000, ("speculative", "pearl", "cascade"), DEEPEST + 5
    drafts = SpeculationMeter(2, 2 * depth, 2 * depth, depth, [2] * depth, [1] * depth, 0.1, 0.1)
    metrics = Metrics()
    metrics.known_tenant = lambda name: name.startswith("t")
    for number in range(tenants):
        for method in methods:
            metrics.finished("demo", "OK", f"t{number}")
            metrics.used("demo", f"t{number}", replace(USAGE, method=method, speculation=drafts))
    found = values(metrics)
    per_tenant = len(methods) * (DEEPEST + 1)
    for name, series in found.items():
        by_depth = name.startswith(("turnout_draft_depth_rounds", "turnout_accepted_depth_rounds"))
        most = (MOST_DRAFTING + 1) * per_tenant if by_depth else 3 * tenants
        assert len(series) <= most, name
    for name in ("draft_rounds", "draft_seconds", "draft_depth_rounds", "accepted_depth_rounds"):
        assert len({labels[-1] for labels in found[f"turnout_{name}_total"]}) == MOST_DRAFTING + 1
    rounds = found["turnout_draft_rounds_total"]
    assert sum(rounds.values()) == 2 * tenants * len(methods)
    assert rounds["own", "pearl", OTHER] == 2 * (tenants - MOST_DRAFTING)
    assert rounds["own", "pearl", "t0"] == 2, "its own series stays its own"
    assert len(found["turnout_tenant_requests_total"]) == tenants


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (invalid("temperature", "must be less"), "temperature"),
        (invalid("messages.3.role", "must be"), "messages"),
        (invalid("x" * 50, "unknown"), "other"),
        (TurnoutError(invalid("a", "b").code, "no field"), "other"),
    ],
)
def test_refusals_are_counted_by_fields_that_exist(error: TurnoutError, field: str) -> None:
    metrics = Metrics()
    metrics.refused(error)
    assert values(metrics)["turnout_refusals_total"] == {("INVALID_ARGUMENT", field): 1}


def test_pools_tell_what_they_hold() -> None:
    config = make_config()
    metrics = Metrics(pools=config.pools)
    metrics.stores({"demo": [POOL, replace(POOL, place="b pid 2", members=(replace(MEMBER, step_seconds=0.05),))]})
    found = values(metrics)
    assert found["turnout_pool_up"] == {("demo",): 1}
    assert found["turnout_pool_replicas"] == {("demo",): 2}
    assert (found["turnout_pool_min_replicas"], found["turnout_pool_max_replicas"]) == ({("demo",): 1}, {("demo",): 1})
    assert found["turnout_pool_requests"] == {("demo",): 8}
    assert found["turnout_pool_batch_requests"] == {("demo",): 10}
    assert found["turnout_pool_waiting_seconds"] == {("demo",): pytest.approx(1.4)}
    blocks = {state: count for (_, _, state), count in found["turnout_kv_blocks"].items()}
    assert blocks == {"used": 60, "cached": 100, "free": 40}
    assert found["turnout_model_step_seconds"] == {("large", "demo"): 0.05}
    assert found["turnout_model_restarts_total"] == {("large", "demo"): 2}
    audits = {result: count for (_, result), count in found["turnout_audits_total"].items()}
    assert audits == {"equal": 12, "tie": 2, "mismatch": 0, "dropped": 4, "failed": 0}
    assert found["turnout_replica_starts_total"] == {("demo",): 2}
    assert found["turnout_route_log_dropped_total"] == {("demo",): 14}
    metrics.stores({})
    assert values(metrics)["turnout_pool_up"] == {("demo",): 0}
    assert values(metrics)["turnout_pool_replicas"] == {("demo",): 2}, "of old: nobody said otherwise"


def test_counts_of_replicas_only_grow() -> None:
    grown, name = Growing(), ("count",)

    def take(process: str, value: float) -> float:
        grown.take((process,), {name: value})
        return grown.totals[name]

    assert [take("a", 3), take("b", 10), take("a", 5)] == [3, 13, 15]
    # `b` was gone for a while, and `a` began anew under the same name.
    assert [take("a", 2), take("b", 10), take("b", 11)] == [17, 17, 18]
    assert not grown.take(("a",), {name: 2.0})
    for number in range(MOST_PROCESSES):
        assert grown.take((f"p{number}",), {name: 0.0})
    assert grown.totals[name] == 18


def test_everything_in_the_catalogue_can_be_had_and_nothing_else() -> None:
    config = make_config()
    metrics = Metrics(pools=config.pools)
    metrics.stores({"demo": [POOL]})
    text = metrics.render().decode()
    shown: dict[str, Any] = {family.name: family for family in text_string_to_metric_families(text)}
    certain = (*COUNTED, *READ, *CONVENTIONS)
    assert {metric.name for metric in certain} <= set(shown) <= {metric.name for metric in (*ALL, *CONVENTIONS)}
    for metric in certain:
        assert (shown[metric.name].type, shown[metric.name].documentation) == (metric.kind, metric.meaning)


def test_http_answers_carry_drift_and_the_time_in_the_queue() -> None:
    reading = DriftReading("gate", "v1", 0.5, 0.25, 128)
    shown = usage_object(combine([USAGE, replace(USAGE, drift=reading, queue_s=0.7)]))["turnout"]
    assert shown["drift"] == {"calibration": "gate", "version": "v1", "index": 0.5, "limit": 0.25, "answers": 128}
    assert shown["queue_s"] == 0.7
    assert usage_object(USAGE)["turnout"]["drift"] is None


@pytest.mark.parametrize("clock_ahead_s", [0.0, -700.0, 700.0])
def test_a_new_ingress_does_not_tell_of_what_the_one_before_told(clock_ahead_s: float) -> None:
    now = time.time() + clock_ahead_s
    old_find = AuditDiff("r1", "plain", 0, 3, (7, "a"), (8, "b"), 0.7, "large", now - 500)
    audit = AuditStats(equal=6, mismatches=2, last=(old_find, replace(old_find, found_at=now - 5)))
    old = replace(POOL, audit=audit, began=now - 1000, now=now)
    metrics = Metrics(pools=make_config().pools)

    def told(stats: PoolStats) -> tuple[float, float, float, float]:
        metrics.stores({"demo": [stats]})
        found = values(metrics)
        audits = found["turnout_audits_total"]
        starts = found["turnout_replica_starts_total"]["demo",]
        restarts = found["turnout_model_restarts_total"]["large", "demo"]
        return audits["demo", "equal"], audits["demo", "mismatch"], restarts, starts

    # What was found while one ingress took over from the other is told by both, so that neither can leave it out.
    assert told(old) == (0, 1, 0, 0)
    assert told(replace(old, audit=replace(audit, equal=9, mismatches=3))) == (3, 2, 0, 0)
    assert told(replace(old, place="b pid 2", began=now)) == (9, 4, 1, 1)


def test_broken_files_of_access_are_told_of() -> None:
    metrics = Metrics()
    assert values(metrics)["turnout_access_faults"] == {(): 0}
    metrics.access_faults(2)
    assert values(metrics)["turnout_access_faults"] == {(): 2}


def families_of(text: bytes) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def test_series_of_several_processes_say_whose_they_are() -> None:
    processes = {name: Metrics() for name in ("11", "12")}
    for count, metrics in enumerate(processes.values(), 1):
        for _ in range(count):
            metrics.finished("demo", "OK")
    found = families_of(process_metrics.render({name: each.counted() for name, each in processes.items()}))
    alone = families_of(processes["12"].render())
    assert {name: alone[name].type for name in found} == {name: each.type for name, each in found.items()}
    assert all("process" in sample.labels for family in found.values() for sample in family.samples)
    totals = [each for each in found["turnout_requests"].samples if each.name == "turnout_requests_total"]
    assert {each.labels["process"]: each.value for each in totals} == {"11": 1.0, "12": 2.0}
