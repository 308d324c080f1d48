"""Drift of what a pool's thresholds see, as Prometheus and `turnout status` see it."""

from __future__ import annotations

from dataclasses import replace

from cli.status import drifted, read_metrics
from deployments.metrics import Metrics
from turnout.calls import DriftReading, Usage
from turnout.cost import Cost, CostReport, SpeculationMeter

COST = Cost(1.0, 1.0, 1.0)
USAGE = Usage(
    1, 1, 0, {}, SpeculationMeter(), 0, CostReport(COST, COST, 0.5), "entropy_adaptive", {}, 1, 0.1, 0.2
)  # fmt: skip


def test_a_reading_becomes_a_gauge_and_beyond_its_limit_a_warning() -> None:
    metrics = Metrics()
    metrics.used("demo", "default", USAGE)
    assert "turnout_drift{" not in metrics.render().decode()
    for name, index in (("calm", 0.1), ("far", 0.2), ("far", 0.8)):
        metrics.used("demo", "default", replace(USAGE, drift=DriftReading(name, "v", index, 0.25, 128)))
    found = read_metrics(metrics.render().decode())
    assert found['turnout_drift{artifact="calm",model="demo"}'] == 0.1
    assert found['turnout_drift{artifact="far",model="demo"}'] == 0.8
    assert found['turnout_drift_limit{artifact="far",model="demo"}'] == 0.25
    assert drifted(found) == [
        'drift: artifact="far",model="demo": stability index 0.80 > 0.25; calibrate or train again'
    ]


def test_a_routers_reading_stands_beside_that_of_the_calibration_it_led_to() -> None:
    metrics = Metrics()
    calibration, router = DriftReading("gate", "v", 0.1, 0.25, 128), DriftReading("router", "w", 0.9, 0.3, 256)
    metrics.used("demo", "default", replace(USAGE, drift=calibration, router_drift=(router,)))
    found = read_metrics(metrics.render().decode())
    shown = {name: value for name, value in found.items() if name.startswith("turnout_drift")}
    assert shown == {
        'turnout_drift{artifact="gate",model="demo"}': 0.1,
        'turnout_drift_limit{artifact="gate",model="demo"}': 0.25,
        'turnout_drift{artifact="router",model="demo"}': 0.9,
        'turnout_drift_limit{artifact="router",model="demo"}': 0.3,
    }
