"""What a replica says when Serve asks whether it can go on, and the ingress when anybody asks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.build_info import this_program
from deployments.health import SharedAnswer
from deployments.pool_deployment import ServedPool
from deployments.version_check import Origin
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import make_config, make_service
from turnout.calls import MemberStats
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError

STUCK = MemberStats("large", 1, 2, 3, 4, 5, 6, 0.5, working_s=61.0)


class Asked:
    """Somebody who answers when told to, and counts how often it was asked."""

    def __init__(self) -> None:
        self.times = 0
        self.seconds = 0.0
        self.go = asyncio.Event()
        self.answers = SharedAnswer(self._answer, 1.0, clock=lambda: self.seconds)

    async def _answer(self) -> int:
        self.times += 1
        await self.go.wait()
        if self.times == 3:
            raise TurnoutError(Code.UNAVAILABLE, "nobody there")
        return self.times


async def test_all_who_ask_within_a_second_share_an_answer() -> None:
    asked = Asked()
    waiting = [asyncio.create_task(asked.answers.get()) for _ in range(100)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # who leaves takes it away from nobody
    asked.seconds = 5.0
    late = asyncio.create_task(asked.answers.get())  # an answer that is still to come is good for this one too
    await asyncio.sleep(0)
    asked.go.set()
    assert set(await asyncio.gather(*waiting[1:], late)) == {1}
    for seconds, answer in ((5.0, 2), (5.9, 2)):
        asked.seconds = seconds
        assert await asked.answers.get() == answer
    asked.seconds = 6.1
    for _ in range(2):
        with pytest.raises(TurnoutError, match="nobody there"):
            await asked.answers.get()
    asked.seconds = 7.2
    assert await asked.answers.get() == asked.times == 4


async def test_asking_for_health_asks_the_pools_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service, times = make_service(), 0
    stats = service._health.stats

    async def counted() -> Any:
        nonlocal times
        times += 1
        return await stats()

    monkeypatch.setattr(service._health, "stats", counted)
    assert set(await asyncio.gather(*(service.health() for _ in range(50)))) == {"ok"}
    assert times == 1


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
