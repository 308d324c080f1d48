"""A pool's actors as they are loaded: what does not fit is refused with its place and a remedy, and leaves nothing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
import ray

from actors.incarnation import Program, check_model, failure_of
from actors.pool import ActorPool
from actors.protocol import ModelCard
from tests.actors.faulty_hosts import ALOOF, STRANGE
from tests.actors.hosts import poll
from tests.engine.harness import ask
from turnout.calls import ScoreCall
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError

pytestmark = pytest.mark.timeout(600)  # starting processes takes its time on a machine that is busy

CARD = ModelCard("m", "llama", 1, 2, 3, 4, "d1", "c1", {"python": "3", "torch": "2", "ray": "2"}, "10.0.0.7", "", 42)
PROGRAM = Program("10.0.0.1 pid 5", "c1", {"python": "3", "torch": "2", "ray": "2"})


def placed(
    config: TurnoutConfig, small: str = "large", models: dict[str, str] | None = None, **placement: Any
) -> TurnoutConfig:
    """The pool in actors; one model in both usual roles unless another is given."""
    settings = PlacementConfig(models="actors", **{"cpus": 0.5, "threads": 1, "start_timeout_s": 240.0, **placement})
    pool = config.pools["pair"].model_copy(update={"placement": settings, "small": small, "models": models or {}})
    return config.model_copy(update={"pools": {"pair": pool}})


@pytest.fixture
def free(ray_cluster: None) -> Iterator[None]:
    """Whatever a test took of the cluster it has given back; Ray tells of it a moment later."""
    _wait_for_all()
    yield
    _wait_for_all()


def _wait_for_all() -> None:
    deadline = time.monotonic() + 30.0
    while (left := ray.available_resources().get("CPU")) != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, f"only {left} CPUs are free"
        time.sleep(0.1)


def refusal(config: TurnoutConfig, host: str | None = None) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        ActorPool.load("pair", config, host=host)
    assert caught.value.code is Code.UNAVAILABLE
    return caught.value


def test_another_program_is_refused_with_both_places():
    PROGRAM.check("model 'm'", CARD)
    for other, what in (
        (replace(CARD, code="c2"), "other code"),
        (replace(CARD, versions={**CARD.versions, "torch": "1"}), "torch 1"),
    ):
        with pytest.raises(TurnoutError, match=what) as caught:
            PROGRAM.check("model 'm'", other)
        assert all(each in caught.value.message for each in ("10.0.0.7 pid 42", "10.0.0.1 pid 5", "install the same"))


def test_another_model_under_the_same_name_is_refused_with_both_places():
    other = replace(CARD, digest="d2", node_ip="10.0.0.8")
    check_model("model 'm'", CARD, CARD)
    with pytest.raises(TurnoutError, match="same checkpoint on every node") as caught:
        check_model("model 'm'", CARD, other)
    assert all(each in caught.value.message for each in ("d1", "d2", "10.0.0.7", "10.0.0.8"))


def test_a_copy_that_computes_otherwise_is_refused_with_both_places():
    first = replace(CARD, numerics="triton sm90")
    check_model("model 'm'", first, first)
    with pytest.raises(TurnoutError, match=r"placement\.resources") as caught:
        check_model("model 'm'", first, replace(first, numerics="triton sm80", node_ip="10.0.0.8"))
    assert all(each in caught.value.message for each in ("sm90", "sm80", "10.0.0.7", "10.0.0.8"))


def test_what_an_actor_refuses_keeps_its_code_and_field():
    error = failure_of(TurnoutError(Code.INVALID_ARGUMENT, "no such file", "models.m.path"), "model 'm' (here)")
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "models.m.path")
    assert error.message == "model 'm' (here): no such file"


def test_a_bundle_no_node_can_host_is_refused_at_once(actors_config: TurnoutConfig, free: None):
    error = refusal(placed(actors_config, resources={"large": {"target": 1}}))
    assert "target: 1" in error.message
    assert "nodes offer" in error.message


def test_bundles_that_are_taken_are_waited_for_and_refused(actors_config: TurnoutConfig, free: None):
    total = ray.cluster_resources()["CPU"]
    error = refusal(placed(actors_config, small="small", cpus=total, start_timeout_s=1.0))
    assert "no room in 1 s" in error.message


def test_an_actor_with_other_code_is_refused_and_ended(actors_config: TurnoutConfig, ray_cluster: None):
    error = refusal(placed(actors_config), STRANGE)
    assert "other code of ours (0123456789abcdef)" in error.message
    assert f"pid {os.getpid()}" in error.message


def test_a_rank_that_does_not_join_is_named(actors_config: TurnoutConfig, ray_cluster: None):
    error = refusal(placed(actors_config, small="small", join_timeout_s=2.0), ALOOF)
    # The one that is missing, where it runs, and what to do; not the one that waited for it.
    missing = r"^group 1 of 2 members: rank 1 \(model 'large' of pool 'pair' at \S+ pid \d+\) did not come to the step"
    assert re.search(missing, error.message), error.message
    assert "placement.join_timeout_s" in error.message
    assert "(says rank 0 of group 1, model 'small'" in error.message


def test_weights_are_looked_at_where_the_model_is_loaded(
    actors_config: TurnoutConfig, models_folder: Path, tmp_path: Path, ray_cluster: None
):
    """This process starts the actor, whose node lacks them, and the refusal says where."""
    folder = copytree(models_folder / "large", tmp_path / "large", ignore=ignore_patterns("*.safetensors"))
    large = actors_config.models["large"].model_copy(update={"path": str(folder)})
    config = actors_config.model_copy(update={"models": {**actors_config.models, "large": large}})
    with pytest.raises(TurnoutError, match="has no weights") as caught:
        ActorPool.load("pair", placed(config))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "models.large.path")
    assert caught.value.message.startswith("model 'large' of pool 'pair'")
    assert re.search(r" pid \d+\): ", caught.value.message), caught.value.message


async def test_one_model_in_both_roles_is_one_actor_and_closing_ends_it(actors_config: TurnoutConfig, free: None):
    pool = ActorPool.load("pair", placed(actors_config))
    (supervisor,) = pool.supervisors
    pid = supervisor.card.pid
    reply = await ask(pool, "one for two", "speculative")  # type: ignore[arg-type]
    assert len(reply.ids) == 16
    scored = await pool.score(ScoreCall("s", "pair", "one", ("two",)))
    assert len(scored) == 1
    assert [model.name for model in pool.models()] == ["pair", "large"]
    await pool.close()
    await poll(lambda: not Path(f"/proc/{pid}").exists(), "its process ended", 30)
    with pytest.raises(TurnoutError, match="closed"):
        await ask(pool, "too late")  # type: ignore[arg-type]
    await poll(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], "its bundle is free", 30)


async def test_a_third_role_has_an_actor_of_its_own(actors_config: TurnoutConfig, free: None):
    pool = ActorPool.load("pair", placed(actors_config, models={"judge": "small"}))
    assert pool.model_pool.roles == {"small": "large", "large": "large", "judge": "small"}
    assert len({supervisor.card.pid for supervisor in pool.supervisors}) == 2
    reply = await ask(pool, "who judges", "plain", {"model": "judge"})  # type: ignore[arg-type]
    assert {token.source for token in reply.tokens} == {"small"}
    assert list(reply.usage.models) == ["small"]
    assert [member.model for member in pool.stats().members] == ["large", "small"]
    await pool.close()
