"""Dashboards, alerts, runbooks and the page of metrics agree with what is counted."""

from __future__ import annotations

import re

import pytest

from deployments.telemetry.catalogue import ALL, CONVENTIONS
from scripts import write_dashboards, write_metrics_docs
from tests.observability.queries import DASHBOARDS, ROOT, alerts, names_in, panels

RUNBOOK = (ROOT / "ops" / "runbooks" / "alerts.md").read_text(encoding="utf-8")


def test_the_page_of_metrics_is_what_the_catalogue_says() -> None:
    page = write_metrics_docs.PAGE.read_text(encoding="utf-8")
    assert page == write_metrics_docs.render(page), "run: .venv/bin/python -m scripts.write_metrics_docs"
    assert page.count("| `turnout_") >= len(ALL)
    assert all(page.count(f"| `{metric.exposed}` |") == 1 for metric in CONVENTIONS)


def test_dashboards_are_what_the_script_writes() -> None:
    assert [path.name for path in DASHBOARDS] == sorted(write_dashboards.DASHBOARDS)
    for path in DASHBOARDS:
        expected = write_dashboards.render(*write_dashboards.DASHBOARDS[path.name])
        assert path.read_text(encoding="utf-8") == expected, "run: .venv/bin/python -m scripts.write_dashboards"


def test_queries_name_metrics_that_exist_and_every_metric_is_shown_or_watched() -> None:
    queries = [query for _, query in panels()] + [rule["expr"] for rule in alerts()]
    named = set().union(*map(names_in, queries))
    known = {metric.name for metric in ALL}
    assert named <= known
    # These are for questions that no diagram asks.
    rare = {
        "turnout_forwards", "turnout_pool_tokens_per_second", "turnout_shadows_dropped", "turnout_audit_tokens",
        "turnout_route_log_dropped",
        *(name for name in known if name.startswith("turnout_cache_")),
    }  # fmt: skip
    assert known - named <= rare


def test_names_tell_units_and_labels_are_few() -> None:
    for metric in ALL:
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")
            assert list(metric.buckets) == sorted(metric.buckets)
        # What is counted by depth is of few tenants and drafters: see tests/deployments/test_metrics.py.
        assert len(metric.labels) <= (4 if "depth" in metric.labels else 3)
        assert set(metric.labels) <= {
            "model", "pool", "method", "outcome", "code", "field", "kind", "slo", "depth", "way", "artifact",
            "tenant", "drafter", "state", "result", "tier", "reason",
        }  # fmt: skip


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_every_alert_has_its_section_in_the_runbook(rule: dict[str, object]) -> None:
    name = str(rule["alert"])
    assert re.search(rf"^## {name}$", RUNBOOK, re.MULTILINE)
    annotations = rule["annotations"]
    assert isinstance(annotations, dict)
    assert annotations["runbook_url"] == f"{{{{ $externalLabels.docs }}}}/runbooks/alerts.html#{name.lower()}"
    assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})


def test_every_section_of_the_runbook_has_its_alert() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE) == [rule["alert"] for rule in alerts()]
