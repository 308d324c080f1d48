"""The drift of a pool's entropies, as Prometheus and `turnout status` see it."""

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
    assert "entropy_drift{" not in metrics.render().decode()
    for name, index in (("calm", 0.1), ("far", 0.2), ("far", 0.8)):
        metrics.used("demo", "default", replace(USAGE, drift=DriftReading(name, "v", index, 0.25, 128)))
    found = read_metrics(metrics.render().decode())
    assert found['turnout_entropy_drift{calibration="calm",model="demo"}'] == 0.1
    assert found['turnout_entropy_drift{calibration="far",model="demo"}'] == 0.8
    assert found['turnout_entropy_drift_limit{calibration="far",model="demo"}'] == 0.25
    assert drifted(found) == ['drift: calibration="far",model="demo": stability index 0.80 > 0.25; calibrate again']
