"""What a replica says when Serve asks whether it can go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.agreement import Origin
from deployments.pool_deployment import ServedPool
from deployments.program import this_program
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import make_config
from turnout.calls import MemberStats
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError

STUCK = MemberStats("large", 1, 2, 3, 4, 5, 6, 0.5, working_s=61.0)


def served(config: TurnoutConfig) -> ServedPool:
    pool = ServedPool("demo", config, load_fake_pool, Origin("v1", this_program()))
    pool._closed = True  # nobody awaits what Serve would
    held = replace(pool._pool.stats(), members=(STUCK,))
    pool._pool.stats = lambda: held  # type: ignore[method-assign]
    return pool


@pytest.mark.parametrize(
    ("models", "limit_s", "ill"), [("colocated", 60.0, True), ("colocated", 62.0, False), ("actors", 60.0, False)]
)
async def test_a_forward_that_does_not_end_makes_a_replica_ill(models: str, limit_s: float, ill: bool) -> None:
    """Where actors are supervised, theirs is another process's, which is replaced alone."""
    config = make_config()
    pool = config.pools["demo"]
    placement = pool.placement.model_copy(update={"models": models, "forward_timeout_s": limit_s})
    asked = served(config.model_copy(update={"pools": {"demo": pool.model_copy(update={"placement": placement})}}))
    if not ill:
        await asked.check_health()
        return
    with pytest.raises(TurnoutError, match=r"a forward of large has been running for 61\.0 s"):
        await asked.check_health()
