"""A router's report is of the probe that is saved with it: calibrated, and on prompts that it has not seen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import numpy as np
import pytest
import torch

from router.difficulty.probe import Probe
from tests.training.test_router_training import planted, trained
from training.router_measures import calibration_interval
from training.router_targets import WhoIsRight, labels_of
from training.router_training import read_prompts, split


@pytest.mark.parametrize("way", ["temperature", "isotonic"])
async def test_the_calibration_error_is_of_the_calibrated_probe_on_held_out_prompts(
    way: Literal["temperature", "isotonic"],
) -> None:
    outcomes, prompts = planted(300)
    made, pool = await trained(outcomes, prompts, WhoIsRight(), calibration=way, epochs=10)
    probe = Probe.load(made.artifact)
    with torch.inference_mode():
        raw = probe.network(await read_prompts(pool, prompts, lambda *_: None))
        calibrated = probe.scaling(raw.numpy())
    labels = labels_of(WhoIsRight(), outcomes).double().numpy()
    _, tune, heldout = split(outcomes, 0)

    def error(scores: np.ndarray, rows: list[int], place: int) -> object:
        return pytest.approx(asdict(calibration_interval(scores[rows, place], labels[rows, place], 0)), abs=1e-6)

    for place, name in enumerate(probe.labels):
        found = made.report["predictions"][name]["expected_calibration_error"]
        assert found == error(calibrated, heldout, place)
        assert found != error(calibrated, tune, place)
        assert found != error(raw.sigmoid().double().numpy(), heldout, place)
    assert made.artifact.settings["predictions"] == made.report["predictions"]
