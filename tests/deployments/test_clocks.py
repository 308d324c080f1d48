"""A node whose clock is off is refused by name before anything is deployed on it."""

from __future__ import annotations

import re
import time

import pytest

from deployments import cluster_checks
from deployments.cluster_checks import check_clocks
from turnout.errors import Code, TurnoutError


def late() -> float:
    return time.time() - 3600.0


def test_clocks_of_real_nodes(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    check_clocks()
    monkeypatch.setattr(cluster_checks, "clock", late)
    with pytest.raises(TurnoutError) as refused:
        check_clocks()
    assert refused.value.code is Code.UNAVAILABLE
    found = re.match(r"node [\d.]+ has a clock that is ([\d.]+) s behind this machine's", refused.value.message)
    assert found is not None
    assert 3000 < float(found[1]) <= 3600  # what the round trip took is left out
    assert "chrony" in refused.value.message
