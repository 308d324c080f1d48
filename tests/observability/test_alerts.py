"""The alert rules by Prometheus' own tool: well formed, and each fires at its fault and not without."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from deployments.metrics import CALLER_DEADLINE
from tests.observability.queries import ALERTS, alerts

pytestmark = [
    pytest.mark.observability,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH (Debian: prometheus)"),
]


def test_rules_are_well_formed() -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    config = ALERTS.parent / "prometheus.yml"
    checked = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


class Case(NamedTuple):
    """Series at a value a minute: at which an alert has fired by that minute, and, just short of it, has not."""

    fault: dict[str, str]
    calm: dict[str, str]
    minute: int


def requests(ok: int, others: int, outcome: str) -> dict[str, str]:
    return {
        'turnout_requests_total{model="m",outcome="OK"}': f"0+{ok}x40",
        f'turnout_requests_total{{model="m",outcome="{outcome}"}}': f"0+{others}x40",
    }


def no_room(ok: int, refused: int, field: str) -> dict[str, str]:
    refusals = f'turnout_refusals_total{{code="RESOURCE_EXHAUSTED",field="{field}"}}'
    return requests(ok, refused, "RESOURCE_EXHAUSTED") | {refusals: f"0+{refused}x40"}


def slow(good: int) -> dict[str, str]:
    counted = {'turnout_request_seconds_count{model="m"}': "0+100x40"}
    return {'turnout_good_requests_total{model="m"}': f"0+{good}x40", **counted}


def replicas(number: int, least: int, most: int, waiting_s: float = 0.0) -> dict[str, str]:
    return {
        'turnout_pool_replicas{pool="p"}': f"{number}x30",
        'turnout_pool_min_replicas{pool="p"}': f"{least}x30",
        'turnout_pool_max_replicas{pool="p"}': f"{most}x30",
        'turnout_pool_waiting_seconds{pool="p"}': f"{waiting_s}x30",
    }


def blocks(used: int) -> dict[str, str]:
    states = {"used": used, "cached": (100 - used) // 2, "free": 100 - used - (100 - used) // 2}
    labels = 'pool="p",model="m",state='
    return {f'turnout_kv_blocks{{{labels}"{state}"}}': f"{count}x30" for state, count in states.items()}


def audits(minutes: int = 400, **values: str) -> dict[str, str]:
    """Results that are not named go on being found, or are none."""
    found = {"equal": f"0+1x{minutes}", "tie": f"0x{minutes}", "mismatch": f"0x{minutes}", "failed": f"0x{minutes}"}
    found |= {"dropped": f"0+1x{minutes}", **values}
    return {f'turnout_audits_total{{pool="p",result="{result}"}}': value for result, value in found.items()}


def drift(index: float) -> dict[str, str]:
    labels = '{model="m",artifact="c"}'
    return {f"turnout_drift{labels}": f"{index}x60", f"turnout_drift_limit{labels}": "0.25x60"}


def one(series: str, fault: str, calm: str, minute: int) -> Case:
    return Case({series: fault}, {series: calm}, minute)


def restarts(model: int, replica: int) -> dict[str, str]:
    """So many in a quarter of an hour, with traffic of all other kinds."""
    return {
        'turnout_model_restarts_total{pool="p",model="m"}': f"0x10 {model}x20",
        'turnout_replica_starts_total{pool="p"}': f"4x10 {4 + replica}x20",
        'turnout_pool_max_replicas{pool="p"}': "4x40",
    }


MISMATCH = 'turnout_audits_total{pool="p",result="mismatch"}'
CASES: dict[str, list[Case]] = {
    "TurnoutDown": [one('up{job="turnout"}', "0x10", "0 0 1x10", 5)],
    "TurnoutPoolDown": [one('turnout_pool_up{pool="p"}', "0x10", "0 0 1x10", 5)],
    "TurnoutTooFewReplicas": [Case(replicas(1, 2, 4), replicas(2, 2, 4), 15)],
    "TurnoutFailing": [
        Case(requests(94, 6, outcome), requests(96, 4, outcome), 20)
        for outcome in ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED")
    ] + [
        Case(requests(94, 6, "INTERNAL"), requests(50, 50, outcome), 20)
        for outcome in ("INVALID_ARGUMENT", CALLER_DEADLINE)
    ],
    "TurnoutRefusing": [
        Case(no_room(89, 11, "other"), no_room(91, 9, "other"), 25),
        Case(no_room(89, 11, "other"), no_room(10, 90, "tenant"), 25),
        Case(no_room(89, 11, "other"), no_room(10, 90, "body"), 25),
    ],
    "TurnoutSlow": [Case(slow(89), slow(91), 35)],
    "TurnoutSaturated": [
        Case(replicas(4, 1, 4, 11.0), replicas(4, 1, 4, 9.0), 15),
        Case(replicas(4, 1, 4, 11.0), replicas(3, 1, 4, 30.0), 15),
    ],
    "TurnoutCacheScarce": [Case(blocks(96), blocks(94), 15)],
    "TurnoutAnswersDiffer": [
        Case(audits(mismatch="0 0 0 1x20"), audits(), 6),
        # Found before the first scrape; and one of old, that is no news.
        Case(audits(mismatch="_x100 1x30"), audits(mismatch="1x400"), 120),
    ],
    "TurnoutAuditsFail": [Case(audits(failed="0 0 0 1x20"), audits(), 6)],
    "TurnoutAuditsStarve": [
        Case(audits(equal="0x400"), audits(equal="0x100 1x300"), 380),
        Case(audits(equal="0x400"), audits(equal="0x400", dropped="0x400"), 380),
    ],
    "TurnoutAccessFileBroken": [one("turnout_access_faults", "0 1x10", "0x10", 5)],
    "TurnoutDrift": [Case(drift(0.26), drift(0.24), 45)],
    "TurnoutStoreDegraded": [one('turnout_cache_degraded{pool="p"}', "1x20", "0x20", 15)],
    "TurnoutModelRestarts": [Case(restarts(4, 0), restarts(1, 9), 16)],
    "TurnoutReplicasReplaced": [Case(restarts(0, 10), restarts(9, 6), 16)],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_at_its_fault_and_not_just_short_of_it(name: str, tmp_path: Path) -> None:
    tests = []
    for case in CASES[name]:
        tests.append(checked(name, case.fault, case.minute, fires=True))
        tests.append(checked(name, case.calm, case.minute, fires=False))
    path = tmp_path / "rules.test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}), encoding="utf-8")
    ran = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def checked(name: str, series: dict[str, str], minute: int, fires: bool) -> dict[str, Any]:
    query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": f"{minute}m", "exp_samples": expected}],
    }


def test_every_alert_has_a_fault() -> None:
    assert sorted(CASES) == sorted(rule["alert"] for rule in alerts())
