"""A calibration in a pool: what the answer's usage says, and an artifact replaced while a request is under way."""

from __future__ import annotations

import os
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifacts
from decoding.calibrated_params import check_method
from decoding.calibration import KnobCalibration
from decoding.drift import STORE, DriftWatch
from decoding.methods.step_speculation import StepSpeculationParams
from pool.local_pool import LocalPool
from pool.routing import PoolRouting
from tests.decoding.curves import CURVE
from tests.engine.harness import call_of
from turnout.calls import GenerateCall, Usage
from turnout.config import PolicyChoice, RoutingConfig, StickyConfig
from turnout.errors import TurnoutError
from turnout.part_choice import PartChoice
from turnout.registry import get_method

PARAMS = {"calibration": "mine", "large_share": 0.15}


def asked(**options: Any) -> GenerateCall:
    return call_of("hello there", "entropy_adaptive", {**PARAMS, **options}, max_tokens=16, seed=3, ignore_eos=True)


async def usage_of(pool: LocalPool, call: GenerateCall) -> Usage:
    *_, last = [event async for event in pool.generate(call)]
    assert isinstance(last, Usage)
    return last


def save(pool: LocalPool, folder: Path, curve: KnobCalibration = CURVE) -> str:
    """Put a calibration for this pool into the folder; its version."""
    digests = {role: pool.model_pool.by_role(role).digest for role in ("small", "large")}
    made = curve.to_artifact(digests, "test")
    path = folder / "mine.safetensors"
    later = path.stat().st_mtime_ns + 10**9 if path.exists() else None
    made.save(path)
    if later is not None:
        os.utime(path, ns=(later, later))
    return made.version


@pytest.fixture
def folder(pool: LocalPool, tmp_path: Path) -> Path:
    pool.model_pool.artifacts = Artifacts(tmp_path)
    return tmp_path


async def test_usage_says_what_was_used_where_it_came_from_and_how_far_it_has_drifted(
    pool: LocalPool, folder: Path
) -> None:
    version = save(pool, folder)
    kept: dict[str, DriftWatch] = pool.model_pool.small.stores.open(STORE, "", dict)
    kept["mine"] = DriftWatch("mine", version, CURVE.drift_limit, window=2)
    first, second = await usage_of(pool, asked()), await usage_of(pool, asked())
    assert first.params["threshold"] == pytest.approx(2.0)
    assert (first.params["window"], first.params["effect"], first.params["calibration"]) == (1, "current", "mine")
    assert first.notes[0].startswith(f"calibration mine, version {version}: threshold 2 ")
    assert first.drift is None
    assert second.drift is not None
    assert (second.drift.calibration, second.drift.version, second.drift.answers) == ("mine", version, 2)


@pytest.mark.parametrize(
    ("method", "field"),
    [
        ({"name": "monitored", "inner": {"name": "entropy_adaptive", "calibration": "nope"}}, "inner.calibration"),
        ({"name": "speculative", "verifier": "judge"}, "verifier.artifact"),
    ],
)
async def test_a_routing_to_a_method_that_would_refuse_every_request_does_not_start(
    pool: LocalPool, folder: Path, method: dict[str, Any], field: str
) -> None:
    config = RoutingConfig(policy=PolicyChoice(name="static", params={"default": {"method": method}}))
    routing = PoolRouting(config, pool.name, pool.model_pool)
    with pytest.raises(TurnoutError) as caught:
        routing.check(pool.intake())
    assert caught.value.field == f"pools.{pool.name}.routing.policy.params.default.method.{field}"
    await routing.close()


@pytest.mark.parametrize("split", [False, True])
async def test_a_budget_whose_calibration_leads_to_a_missing_part_does_not_start(
    pool: LocalPool, folder: Path, split: bool
) -> None:
    fixed = StepSpeculationParams(scorer=PartChoice.of("reward_model")).model_dump(mode="json")
    fixed = {name: fixed[name] for name in StepSpeculationParams.knob.fixed}
    grid = ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0))
    save(pool, folder, replace(CURVE, method="step_speculation", grid=grid, fixed=fixed))
    policy, inner = {"name": "budget", "params": {"calibrations": ["mine"]}}, ""
    if split:
        policy = {"name": "split", "params": {"arms": {"a": {"share": 1, "policy": policy}}}}
        inner = ".arms.a.policy"
    routing = PoolRouting(RoutingConfig(policy=PolicyChoice(**policy)), pool.name, pool.model_pool)
    with pytest.raises(TurnoutError, match="reward_model") as caught:
        routing.check(pool.intake())
    assert caught.value.field == f"pools.{pool.name}.routing.policy.params{inner}.calibrations.0.scorer.artifact"
    await routing.close()


async def test_a_session_goes_on_where_a_new_calibration_ends_below_what_it_keeps(
    pool: LocalPool, folder: Path
) -> None:
    """What `budget` chose from the old curve cannot be planned by the new one; the session's next turn can."""
    save(pool, folder)
    config = RoutingConfig(
        policy=PolicyChoice(name="budget", params={"calibrations": ["mine"]}), sticky=StickyConfig(seconds=60)
    )
    pool.routing = PoolRouting(config, pool.name, pool.model_pool)

    async def turn() -> dict[str, Any]:
        usage = await usage_of(pool, replace(call_of("hello there", max_tokens=8, seed=3), session="ann"))
        assert usage.route is not None
        return {**usage.route, "large_share": usage.route["params"]["large_share"]}

    try:
        first, second = await turn(), await turn()
        assert (first["large_share"], bool(first["kept_from"]), bool(second["kept_from"])) == (0.5, False, True)
        save(pool, folder, replace(CURVE, points=CURVE.points[:2]))
        third, fourth = await turn(), await turn()
        assert third["large_share"] == CURVE.points[1].large_share.value < 0.5
        assert (bool(third["kept_from"]), bool(fourth["kept_from"])) == (False, True)
        assert fourth["version"] == third["version"] != first["version"]
    finally:
        await pool.routing.close()
        pool.routing = None


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


async def test_a_configured_calibration_whose_file_is_gone_goes_on_whatever_is_asked_of_it(
    pool: LocalPool, folder: Path
) -> None:
    version = save(pool, folder)
    default = {**PARAMS, "window": 1}
    check_method(
        pool.model_pool, "entropy_adaptive", get_method("entropy_adaptive").parse(default), "pools.pair.default"
    )
    (folder / "mine.safetensors").unlink()
    for params in (default, PARAMS, {"calibration": "mine"}, {"calibration": "mine", "quality": 0.9}):
        usage = await usage_of(pool, call_of("hello there", "entropy_adaptive", params, max_tokens=4, seed=3))
        assert f"calibration mine, version {version}:" in usage.notes[0]
    with pytest.raises(TurnoutError, match="'other' is not known"):
        await usage_of(pool, call_of("hello there", "entropy_adaptive", {"calibration": "other"}, max_tokens=4))
