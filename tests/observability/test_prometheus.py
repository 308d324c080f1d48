"""Debian's Prometheus beside a served application: every panel shows something, every alert works."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import yaml

from deployments.telemetry.catalogue import CONVENTIONS, KV_USAGE
from tests.observability.conftest import Load, Served
from tests.observability.queries import ALERTS, ROOT, alerts, names_in, panels
from turnout.free_ports import free_port

pytestmark = [
    pytest.mark.observability,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on PATH (Debian: prometheus)"),
]
WINDOW = "20s"  # Grafana would choose one of a few scrapes
# The demo pair's thresholds were found by hand, and only a calibration has drift.
ABSENT = {"turnout_drift", "turnout_drift_limit"}


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30)

    def close(self) -> None:
        self._http.close()

    def query(self, query: str) -> list[dict[str, Any]]:
        answer = self._http.get("/query", params={"query": query})
        assert answer.status_code == 200, f"{query}: {answer.text}"
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def has_data(self, query: str) -> bool:
        """Whether a query gives a number."""
        return any(each["value"][1] != "NaN" for each in self.query(query.replace("$__rate_interval", WINDOW)))

    def rules(self) -> list[dict[str, Any]]:
        groups = self._http.get("/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    @property
    def ready(self) -> bool:
        try:
            return self._http.get("/targets").json()["data"]["activeTargets"][0]["health"] == "up"
        except (httpx.HTTPError, LookupError, ValueError):
            return False


def poll(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def prometheus(served: Served, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration; only its addresses and its pace are others."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
    config["rule_files"] = [str(ALERTS.parent / name) for name in config["rule_files"]]
    (turnout,) = [job for job in config["scrape_configs"] if job["job_name"] == "turnout"]
    turnout["static_configs"] = [{"targets": [served.http.removeprefix("http://")]}]
    config["scrape_configs"] = [turnout]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    running = Prometheus(port)
    try:
        poll(lambda: running.ready, "Prometheus scrapes the server")
        yield running
    finally:
        process.terminate()
        process.wait(timeout=30)
        running.close()


@pytest.mark.smoke
def test_answers_are_counted(prometheus: Prometheus) -> None:
    poll(lambda: prometheus.query("sum(turnout_requests_total) > 0"), "requests in a scrape")


def test_gateways_and_scalers_find_their_gauges(prometheus: Prometheus) -> None:
    for metric in CONVENTIONS:
        name = metric.name if metric.kind == "gauge" else f"{metric.name}_count"
        poll(lambda name=name: prometheus.query(name), name)
    share = {each["metric"]["model_name"]: float(each["value"][1]) for each in prometheus.query(KV_USAGE.name)}
    assert share.keys() == {"demo", "apart"}
    assert all(0 <= value <= 1 for value in share.values())
    scaler = yaml.safe_load((ROOT / "ops" / "kubernetes" / "servers" / "scaledobject.yaml").read_text(encoding="utf-8"))
    (trigger,) = scaler["spec"]["triggers"]
    [found] = prometheus.query(trigger["metadata"]["query"].replace("assistant", "demo"))
    assert float(found["value"][1]) >= 0


def test_every_panel_shows_data(prometheus: Prometheus) -> None:
    queries = panels()
    assert len(queries) > 40
    empty = set(queries)

    def settled() -> bool:
        empty.difference_update([each for each in empty if prometheus.has_data(each[1])])
        return not empty

    deadline = time.monotonic() + 150
    while not settled():
        assert time.monotonic() < deadline, f"without data: {empty}"
        time.sleep(1.0)
    assert not empty


def test_a_batch_shows_how_far_it_is(prometheus: Prometheus) -> None:
    wanted = {"waiting", "done", "failed"}
    query = "sum by (state) (max_over_time(turnout_batch_lines[10m])) > 0"
    poll(lambda: wanted <= {each["metric"]["state"] for each in prometheus.query(query)}, "lines in each state")
    asked = 'max_over_time(turnout_batch_lines{state="running"}[1m]) > 0'
    poll(lambda: prometheus.query(asked), "lines that are asked")


def test_every_alert_is_evaluated_and_what_it_asks_for_is_there(prometheus: Prometheus) -> None:
    expected = [rule["alert"] for rule in alerts()]
    poll(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()), "all rules were evaluated")
    rules = prometheus.rules()
    assert [rule["name"] for rule in rules] == expected
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    names = {full for rule in alerts() for full in _full_names(rule["expr"])}
    poll(lambda: all(prometheus.query(name) for name in names), f"series of {sorted(names)}")
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert "TurnoutAnswersDiffer" not in firing


def _full_names(expression: str) -> set[str]:
    """Metrics as they are asked for, those left out that need a calibration."""
    words = expression.replace("(", " ").replace("{", " ").replace(")", " ").replace("[", " ").split()
    return {word for word in words if word.startswith("turnout_") and not names_in(word) & ABSENT}


def test_audits_looked_at_answers_and_found_them_right(prometheus: Prometheus) -> None:
    good = 'sum by (pool) (turnout_audits_total{result=~"equal|tie"}) > 0'
    poll(lambda: {each["metric"]["pool"] for each in prometheus.query(good)} == {"demo", "apart"}, "both were audited")
    assert not prometheus.query('turnout_audits_total{result=~"mismatch|failed"} > 0')
