"""What a run makes of a worker that is lost."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from experiments.grid import runner
from turnout.errors import Code


@pytest.mark.parametrize("lost", [OutOfMemoryError("killed: the node ran low on memory"), ActorDiedError()])
def test_a_worker_that_is_lost_costs_its_cell_however_ray_says_so(
    lost: RayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(ended: object) -> None:
        raise lost

    monkeypatch.setattr(runner.ray, "get", get)
    fault, alive = runner._outcome(object())
    assert fault is not None
    assert (fault.code, alive) == (Code.UNAVAILABLE, False)
    assert fault.message.startswith("its process ended")
