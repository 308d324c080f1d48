"""A run whose Ray does not start at once."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from experiments.own_ray import ray_of_its_own

pytestmark = pytest.mark.cluster


# Ray waits for no process of a start that it gives up.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_node_that_does_not_come_up_in_time_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_failed_start, get_node = list[psutil.Process](), services.get_node

    def late(*arguments: Any) -> Any:
        if not of_the_failed_start:
            of_the_failed_start.extend(
                child for child in psutil.Process().children() if "ray" in "".join(child.cmdline())
            )
            raise Exception("The current node timed out during startup.")  # what Ray says, after 30 s
        return get_node(*arguments)

    monkeypatch.setattr(services, "get_node", late)
    with ray_of_its_own(2):
        assert len(of_the_failed_start) >= 3  # at least Ray's own head, its raylet, and what reads its logs
        assert not psutil.wait_procs(of_the_failed_start, 60)[1]
        assert ray.cluster_resources()["CPU"] == 2
        assert ray.get(ray.remote(lambda: "at work").remote()) == "at work"
    gc.collect()  # of the failed start's node
