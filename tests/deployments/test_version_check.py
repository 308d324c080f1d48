"""Replicas of one pool that would not run the same: refused when they start, by the name of their node."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from deployments import app
from deployments.app import QUIET, pool_app
from deployments.build_info import this_program
from deployments.pool_options import pool_version
from deployments.serve_status import unsettled_pools
from deployments.starting import Tell, run_until_up, silent
from deployments.version_check import begin
from tests.deployments.conftest import poll
from tests.deployments.scripted_pool import ScriptedPool, load_scripted, scripted_config
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError

NAME = "agreement"


class NamedPool(ScriptedPool):
    """Its models are what a file says when they are loaded."""

    def __init__(self, name: str, config: TurnoutConfig) -> None:
        super().__init__(name, config)
        digests = {"small": "1", "large": (self.folder / "weights").read_text(encoding="utf-8")}
        self.members = {member: SimpleNamespace(digest=digest) for member, digest in digests.items()}


def load_named(name: str, config: TurnoutConfig) -> NamedPool:
    return NamedPool(name, config)


def load_only_one(name: str, config: TurnoutConfig) -> NamedPool:
    """The first replica loads; those that come later never end to, and fail of nothing."""
    pool = NamedPool(name, config)
    if not first_to_make(pool.folder / "loaded"):
        threading.Event().wait()
    return pool


def load_at_second_try(name: str, config: TurnoutConfig) -> NamedPool:
    pool = NamedPool(name, config)
    if first_to_make(pool.folder / "tried"):
        raise RuntimeError("as a replica of the version before would")
    return pool


def first_to_make(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Failing(Exception):
    """What is waited for is a replica that fails again and again."""


def end_where_one_fails(line: str) -> None:
    if "the last one that failed: " in line:
        raise Failing(line)


def run(config: TurnoutConfig, load: Any = load_named, patience_s: float = 60.0, tell: Tell = silent) -> None:
    """As `deployments.app.deploy` does, without an ingress; gives up where nothing changes for so long."""
    begin(NAME, {"p": pool_version("p", config, load)})
    application = pool_app("p", config, load, unsettled_pools(NAME).get("p", 0))
    waited = config.model_copy(update={"ray": config.ray.model_copy(update={"start_timeout_s": patience_s})})
    run_until_up(serve.RunTarget(target=application, name=NAME, route_prefix=None, logging_config=QUIET), waited, tell)


@pytest.fixture
def gone(cluster: object) -> Iterator[None]:
    yield
    serve.delete(NAME, _blocking=False)
    poll(lambda: NAME not in serve.status().applications, "the application is gone", 60.0)


def test_a_replica_with_other_weights_is_refused_until_the_pool_is_another_version(gone: None, tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    pool = config.pools["p"]
    weights = tmp_path / "weights"
    weights.write_text("aa", encoding="utf-8")
    run(config)
    weights.write_text("bb", encoding="utf-8")
    two = config.model_copy(update={"pools": {"p": pool.model_copy(update={"replicas": 2})}})
    with pytest.raises(Failing) as failing:
        run(two, tell=end_where_one_fails)
    for words in ("node ", "model 'large'", "has the digest bb", "loaded one with aa", "at none "):
        assert words in str(failing.value)
    # Another version, as for a new path, begins anew; and so does the first one, of which no replica is left by then.
    other = two.model_copy(update={"engine": config.engine.model_copy(update={"block_size": 32})})
    run(other)
    weights.write_text("cc", encoding="utf-8")
    run(config)


def test_a_late_failure_of_the_version_before_does_not_end_a_rollout(gone: None, tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    (tmp_path / "weights").write_text("aa", encoding="utf-8")
    assert unsettled_pools(NAME) == {}
    run(config, load_only_one)
    assert unsettled_pools(NAME) == {}
    two = config.model_copy(update={"pools": {"p": config.pools["p"].model_copy(update={"replicas": 2})}})
    with pytest.raises(TurnoutError, match="nothing has changed"):
        run(two, load_only_one, patience_s=5.0)
    assert unsettled_pools(NAME) == {"p": 1}
    # Which of the two fails, Serve counts alike: here it is the first of the new version, and only that one.
    run(two, load_at_second_try)


def test_a_replica_that_runs_another_program_than_the_deployment_is_refused(
    gone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "this_program", lambda: replace(this_program(), code="of another state"))
    with pytest.raises(TurnoutError) as refused:
        run(scripted_config(tmp_path), load_scripted)
    said = "has sources of Turnout, others than the process that deployed this pool"
    assert said in refused.value.message
