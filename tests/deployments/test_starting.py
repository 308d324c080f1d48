"""A start that stands still, because others have what it needs, says what it waits for and ends by its deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from deployments import starting
from deployments.app import QUIET, pool_app
from deployments.starting import run_until_up
from tests.deployments.conftest import poll
from tests.deployments.scripted_pool import load_scripted, scripted_config
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError


@ray.remote(num_cpus=4)
class Other:
    """Another job."""

    def there(self) -> bool:
        return True


def test_what_others_have_is_waited_for_by_name_and_not_for_ever(
    cluster: tuple[TurnoutConfig, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "TELL_S", 0.5)
    config = scripted_config(tmp_path)
    placement = config.pools["p"].placement.model_copy(update={"models": "actors", "cpus": 3.0})
    pool = config.pools["p"].model_copy(update={"placement": placement})
    config = config.model_copy(
        update={"pools": {"p": pool}, "ray": config.ray.model_copy(update={"start_timeout_s": 3.0})}
    )
    other = Other.remote()
    ray.get(other.there.remote())
    told: list[str] = []
    application = pool_app("p", config, load_scripted)
    target = serve.RunTarget(target=application, name="late", route_prefix=None, logging_config=QUIET)
    try:
        with pytest.raises(TurnoutError) as refused:
            run_until_up(target, config, told.append)
    finally:
        ray.kill(other)
        serve.delete("late", _blocking=False)
    assert (refused.value.code, refused.value.field) == (Code.UNAVAILABLE, "ray.start_timeout_s")
    assert "nothing has changed for 3 s (ray.start_timeout_s)" in refused.value.message
    for words in [refused.value.message, told[-1]]:
        assert "pool 'p': replicas starting: 1; 1 of them found no free place for {CPU: 1} and {CPU: 3}" in words
        assert "CPU is short (3 asked, " in words
        assert "pools.p.placement" in words
    poll(lambda: "late" not in serve.status().applications, "the application is gone", 30.0)
