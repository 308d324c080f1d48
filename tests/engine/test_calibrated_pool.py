"""A calibration in a pool: what the answer's usage says, and an artifact replaced while a request is under way."""

from __future__ import annotations

import os
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifacts
from decoding.calibration import KnobCalibration
from decoding.drift import STORE, DriftWatch
from engine.pool import LocalPool
from tests.decoding.curves import CURVE
from tests.engine.harness import call_of
from turnout.calls import GenerateCall, Usage

PARAMS = {"calibration": "mine", "large_share": 0.15}


def asked(**options: Any) -> GenerateCall:
    return call_of("hello there", "entropy_adaptive", {**PARAMS, **options}, max_tokens=16, seed=3, ignore_eos=True)


async def usage_of(pool: LocalPool, call: GenerateCall) -> Usage:
    *_, last = [event async for event in pool.generate(call)]
    assert isinstance(last, Usage)
    return last


def save(pool: LocalPool, folder: Path, curve: KnobCalibration = CURVE) -> str:
    """Put a calibration for this pool into the folder; its version."""
    digests = {role: pool.pool.role(role).digest for role in ("small", "large")}
    made = curve.to_artifact(digests, "test")
    path = folder / "mine.safetensors"
    later = path.stat().st_mtime_ns + 10**9 if path.exists() else None
    made.save(path)
    if later is not None:
        os.utime(path, ns=(later, later))
    return made.version


@pytest.fixture
def folder(pool: LocalPool, tmp_path: Path) -> Path:
    pool.pool.artifacts = Artifacts(tmp_path)
    return tmp_path


async def test_usage_says_what_was_used_where_it_came_from_and_how_far_it_has_drifted(
    pool: LocalPool, folder: Path
) -> None:
    version = save(pool, folder)
    kept: dict[str, DriftWatch] = pool.pool.small.stores.open(STORE, "", dict)
    kept["mine"] = DriftWatch("mine", version, CURVE.drift_limit, window=2)
    first, second = await usage_of(pool, asked()), await usage_of(pool, asked())
    assert first.params["threshold"] == pytest.approx(2.0)
    assert (first.params["window"], first.params["effect"], first.params["calibration"]) == (1, "current", "mine")
    assert first.notes[0].startswith(f"calibration mine, version {version}: threshold 2 ")
    assert first.drift is None
    assert second.drift is not None
    assert (second.drift.calibration, second.drift.version, second.drift.answers) == ("mine", version, 2)


async def test_a_replaced_artifact_leaves_requests_under_way_alone(pool: LocalPool, folder: Path) -> None:
    before = save(pool, folder)
    undisturbed = await usage_of(pool, asked())
    async with aclosing(pool.generate(asked())) as events:
        await anext(events)
        after = save(pool, folder, replace(CURVE, grid=((0.0, 6.0), (0.5, 5.0), (1.0, 0.2))))
        swapped = await usage_of(pool, asked())
        *_, old = [event async for event in events]
    assert isinstance(old, Usage)
    assert f"version {before}:" in old.notes[0]
    assert old.params == undisturbed.params
    assert old.models["small"].generated_tokens == undisturbed.models["small"].generated_tokens
    assert f"version {after}:" in swapped.notes[0]
    assert swapped.params["threshold"] == pytest.approx(5.5)
