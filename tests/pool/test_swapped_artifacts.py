"""Artifacts of a routed pool, replaced while it runs: the next request, requests under way, and bad replacements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifact, Kept
from decoding.model import ModelPool
from decoding.step_heads import StateHead
from pool.local_pool import LocalPool
from router.base import Asked, RoutingPolicy
from router.decision import Decision
from router.routing import Router
from tests.engine.harness import ask
from tests.engine.routed import PROMPT, STATIC, Opened, ask_auto, routed_config
from training.random_models import llama_config
from turnout.errors import TurnoutError

WIDTH = llama_config().hidden_size


class ByArtifact(RoutingPolicy):
    """Answers with the model that an artifact names."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept("chooser", "chooser", lambda artifact: str(artifact.settings["model"]))

    def check(self, models: ModelPool) -> None:
        self.kept.get(models, "policy.params.artifact")

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        await asked.read(models)
        model, version = self.kept.get(models, "policy.params.artifact")
        return Decision("plain", {"model": model}, "by_artifact", version)


def chooser(pool: LocalPool, model: str, kind: str = "chooser", digest: str | None = None) -> Artifact:
    digests = {role: digest or pool.engines[name].digest for role, name in pool.roles.items()}
    return Artifact(kind, "test", {"model": model}, digests, {"weight": torch.zeros(1)})


async def test_a_swapped_artifact_takes_effect_at_the_next_request(opened: Opened, tmp_path: Path) -> None:
    pool = opened({"policy": STATIC}, artifacts=str(tmp_path))
    assert pool.routing is not None
    path = tmp_path / "chooser.safetensors"
    artifacts = {model: chooser(pool, model) for model in ("small", "large")}
    artifacts["small"].save(path)
    policy = ByArtifact()
    pool.routing.router = Router(policy)
    expected = {model: (await ask(pool, PROMPT, "plain", {"model": model}, ignore_eos=True)).ids for model in artifacts}
    running = [asyncio.create_task(ask_auto(pool, ignore_eos=True)) for _ in range(6)]
    while not pool.engines["small"].batcher.tables:
        await asyncio.sleep(0)
    for turn in range(6):
        model = ("large", "small")[turn % 2]
        artifacts[model].save(path)
        reply = await ask_auto(pool, ignore_eos=True)
        assert reply.usage.route is not None
        assert (reply.usage.params["model"], reply.usage.route["version"]) == (model, artifacts[model].version)
        running.append(asyncio.create_task(ask_auto(pool, ignore_eos=True)))
    for reply in await asyncio.gather(*running):
        model = str(reply.usage.params["model"])
        assert reply.ids == expected[model]
        assert reply.usage.route is not None
        assert reply.usage.route["version"] == artifacts[model].version


async def test_a_bad_replacement_changes_nothing_and_a_bad_first_one_is_refused(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = opened({"policy": STATIC}, artifacts=str(tmp_path))
    assert pool.routing is not None
    path = tmp_path / "chooser.safetensors"
    policy = ByArtifact()
    chooser(pool, "small", digest="of another pair").save(path)
    with pytest.raises(TurnoutError, match=r"policy\.params\.artifact: was made for the large model with digest"):
        policy.check(pool.model_pool)
    good = chooser(pool, "small")
    good.save(path)
    policy.check(pool.model_pool)
    pool.routing.router = Router(policy)
    other = chooser(pool, "large", digest="of another pair")
    for spoil in (lambda: path.write_bytes(b"half a file"), lambda: other.save(path), path.unlink):
        spoil()
        for _ in range(2):
            reply = await ask_auto(pool)
            assert reply.usage.route is not None
            assert (reply.usage.params["model"], reply.usage.route["version"]) == ("small", good.version)
    assert len([record for record in caplog.records if "going on with version" in record.message]) == 3


async def test_an_artifact_of_another_pair_is_refused_at_start(pair_folder: Path, tmp_path: Path) -> None:
    models = {"small": "another", "large": "another"}
    Artifact("calibration", "test", {}, models, {}).save(tmp_path / "curve.safetensors")
    for name, says in (("curve", "was made for the large model"), ("none", "is not known; available: curve")):
        policy = {"name": "budget", "params": {"calibrations": [name]}}
        with pytest.raises(TurnoutError, match=says) as caught:
            LocalPool.load("pair", routed_config(pair_folder, {"policy": policy}, artifacts=str(tmp_path)))
        assert caught.value.field == "pools.pair.routing.policy.params.calibrations.0"


def save_head(pool: LocalPool, folder: Path, kind: str, width: int, bias: float) -> str:
    """A head that says the same of everything, beside the thresholds that `enough` reads; its version."""
    head = StateHead(width)
    torch.nn.init.zeros_(head.last.weight)
    torch.nn.init.constant_(head.last.bias, bias)
    settings = {"head": head.settings, "top": 20, "thresholds": {"mean": 64.0}}
    artifact = Artifact(kind, "test", settings, {"large": pool.model_pool.large.digest}, dict(head.state_dict()))
    artifact.save(folder / "mine.safetensors")
    return artifact.version


@pytest.mark.parametrize(
    ("kind", "extra", "method", "params"),
    [
        ("reward_model", 3, "step_speculation", {"scorer": {"name": "reward_model", "artifact": "mine"}}),
        ("reward_model", 3, "best_of", {"k": 2, "rerank": "reward", "artifact": "mine"}),
        ("judge", 0, "speculative", {"verifier": {"name": "judge", "artifact": "mine"}, "draft_length": 3}),
        ("enough", 0, "monitored", {"inner": {"name": "plain"}, "monitor": {"name": "enough", "artifact": "mine"}}),
    ],
)
async def test_answers_name_the_artifacts_of_their_parts(
    opened: Opened, tmp_path: Path, kind: str, extra: int, method: str, params: dict[str, Any]
) -> None:
    pool = opened({"policy": STATIC}, artifacts=str(tmp_path))
    versions = []
    for bias in (-9.0, 9.0):
        versions.append(save_head(pool, tmp_path, kind, WIDTH + extra, bias))
        reply = await ask(pool, PROMPT, method, params, temperature=1.0, seed=1)
        named = [note for note in reply.usage.notes if note.startswith("artifact ")]
        assert named == [f"artifact mine, version {versions[-1]}"]
    assert versions[0] != versions[1]
    reply = await ask(pool, PROMPT, "plain", {})
    assert not any(note.startswith("artifact ") for note in reply.usage.notes)


CALIBRATED = {"name": "entropy_adaptive", "calibration": "none"}
FOR_ONE = {"when": {"tenants": ["a"]}, "method": CALIBRATED}


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        ({"name": "static", "params": {"default": {"method": CALIBRATED}}}, "policy.params.default"),
        (
            {"name": "static", "params": {"rules": [FOR_ONE], "default": {"method": "plain"}}},
            "policy.params.rules.0",
        ),
        (
            {
                "name": "static",
                "params": {"default": {"policy": {"name": "split", "arms": {"a": {"share": 1, "method": CALIBRATED}}}}},
            },
            "policy.params.default.policy.arms.a",
        ),
        (
            {"name": "budget", "params": {"table": [{"method": CALIBRATED, "cost": 1, "quality": 1}]}},
            "policy.params.table.0",
        ),
    ],
)
@pytest.mark.parametrize("shadow", [False, True])
async def test_a_way_whose_calibration_is_not_there_is_refused_at_start(
    pair_folder: Path, tmp_path: Path, policy: dict[str, Any], place: str, shadow: bool
) -> None:
    routing = {"policy": STATIC, "shadow": {"share": 0.1, "policy": policy}} if shadow else {"policy": policy}
    with pytest.raises(TurnoutError, match="'none' is not known") as caught:
        LocalPool.load("pair", routed_config(pair_folder, routing, artifacts=str(tmp_path)))
    assert caught.value.field == f"pools.pair.routing.{'shadow.' if shadow else ''}{place}.method.calibration"
