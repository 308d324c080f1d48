"""`GET /status`: what the pools hold, as JSON."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.service import GenerationService
from tests.deployments.in_process import make_config, make_service
from turnout.calls import MemberStats, PoolStats
from turnout.errors import Code, TurnoutError

MEMBER = MemberStats("small", 1, 2, 3, 4, 5, 6, 0.5, "10.0.0.7 pid 4711", 2)
STATS = PoolStats(1, 2, 3, 4, 5, 6, 7.5, {"small": 0.5}, members=(MEMBER,))


async def ask(service: GenerationService) -> httpx.Response:
    transport = httpx.ASGITransport(build_http(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get("/status")


async def test_status_has_everything_that_a_replica_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service()
    unmeasured = replace(STATS, members=(replace(MEMBER, step_seconds=math.inf),))

    async def stats() -> dict[str, list[PoolStats]]:
        return {"demo": [STATS, unmeasured], "asleep": []}

    monkeypatch.setattr(service, "stats", stats)
    answer = await ask(service)
    assert answer.status_code == 200
    pools = answer.json()["pools"]
    assert pools["demo"][0] == json.loads(json.dumps(asdict(STATS)))
    assert pools["demo"][1]["members"][0]["step_seconds"] is None
    assert pools["asleep"] == []


async def test_status_of_a_real_service() -> None:
    (replica,) = (await ask(make_service())).json()["pools"]["demo"]
    assert (replica["requests"], replica["used_blocks"]) == (0, 0)


class Backend:
    """A pool that has been asked once every one of its kind has."""

    def __init__(self, together: asyncio.Barrier, answer: list[PoolStats] | TurnoutError | None) -> None:
        self.together, self.answer = together, answer

    async def stats(self) -> list[PoolStats]:
        await self.together.wait()
        if isinstance(self.answer, TurnoutError):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        assert isinstance(self.answer, list)
        return self.answer


async def test_pools_that_do_not_answer_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.pool_health.HEALTH_TIMEOUT_S", 0.5)
    together = asyncio.Barrier(3)  # who asks one after the other never gets past the first
    lost = TurnoutError(Code.UNAVAILABLE, "pool 'lost' has no replica; try again later")
    backends: Any = {
        "lost": Backend(together, lost),
        "silent": Backend(together, None),
        "well": Backend(together, [STATS]),
    }
    service = GenerationService(make_config(), backends, Metrics())
    answer = await ask(service)
    assert answer.status_code == 200
    assert answer.json()["errors"] == {"lost": lost.message, "silent": "pool 'silent' does not answer within 0.5 s"}
    assert [(name, len(replicas)) for name, replicas in answer.json()["pools"].items()] == [("well", 1)]
    assert await service.health() == "unavailable"
