"""What the prefix stores of the replicas did, as health, as Prometheus metrics and in `turnout status`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import httpx
import pytest

from cli.status import degraded, read_metrics
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.schemas import chat_job, completion_job
from deployments.service import GenerationService
from tests.deployments.in_process import make_config
from turnout.calls import CacheStats, PoolStats
from turnout.errors import Code, TurnoutError

POOL = PoolStats(0, 0, 0, 0, 100, 0, 0.0, {})
CACHE = CacheStats(
    "ok", 7, {"device": 30, "redis": 64}, {"late": 2}, {"queue": 1}, 5, 1000, 2000, 4096, 0.25
)  # fmt: skip


class Replicas:
    """A pool whose replicas hold this."""

    def __init__(self, *stats: PoolStats) -> None:
        self.held = list(stats)
        self.error: TurnoutError | None = None

    async def stats(self) -> list[PoolStats]:
        if self.error is not None:
            raise self.error
        return self.held


def service_of(*caches: CacheStats | None) -> tuple[GenerationService, Replicas]:
    replicas = Replicas(*(replace(POOL, cache=cache) for cache in caches))
    backends: Any = {"demo": replicas}
    return GenerationService(make_config(), backends, Metrics()), replicas


def stores_of(exposition: bytes) -> list[str]:
    """What it says of pools' stores."""
    lines = exposition.decode().splitlines()
    return [line for line in lines if line.startswith("turnout_cache_") and "pool=" in line]


@pytest.mark.parametrize(
    ("healths", "expected"),
    [
        ((None,), ""),
        (("ok", None), ""),
        (("ok", "degraded"), "1 of 2 replicas cannot reach all of the prefix store"),
        (("off", "ok"), "1 of 2 replicas cannot reach the prefix store"),
        (
            ("off", "degraded", None, "off"),
            "2 of 3 replicas cannot reach the prefix store, 1 of 3 replicas cannot reach all of the prefix store",
        ),
    ],
)
async def test_health_says_where_a_store_is_missing(
    healths: tuple[Literal["ok", "degraded", "off"] | None, ...], expected: str
) -> None:
    service, _ = service_of(*(None if health is None else replace(CACHE, health=health) for health in healths))
    transport = httpx.ASGITransport(app=build_http(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/healthz")
        headed = await http.head("/healthz")
    store = {"store": f"degraded: {expected}; what it holds is computed"} if expected else {}
    assert (answer.status_code, answer.json()) == (200, {"status": "degraded" if expected else "ok", **store})
    assert (headed.status_code, headed.content) == (200, b"")


async def test_replicas_are_summed_and_pools_without_a_store_left_out() -> None:
    service, _ = service_of(CACHE, replace(CACHE, tokens={"memory": 8, "redis": 6}, health="degraded"), None)
    found = read_metrics((await service.exposition.text()).decode())
    assert found['turnout_cache_lookups_total{pool="demo"}'] == 14
    assert {
        name.partition("tier=")[2].strip('"}'): value for name, value in found.items() if "cache_tokens" in name
    } == {"device": 30, "memory": 8, "redis": 70}
    assert found['turnout_cache_faults_total{kind="late",pool="demo"}'] == 4
    assert found['turnout_cache_dropped_total{pool="demo",reason="queue"}'] == 2
    assert found['turnout_cache_regret_seconds_total{pool="demo"}'] == 0.5
    assert found['turnout_cache_memory_bytes{pool="demo"}'] == 8192
    assert degraded(found) == [
        'degraded: pool="demo": 1 replicas cannot reach all of the prefix store; what it holds is computed'
    ]
    without, _ = service_of(None)
    assert stores_of(await without.exposition.text()) == []


async def test_a_pool_that_does_not_answer_keeps_its_last_numbers() -> None:
    service, replicas = service_of(CACHE)
    before = stores_of(await service.exposition.text())
    replicas.error = TurnoutError(Code.UNAVAILABLE, "planted")
    assert stores_of(await service.exposition.text()) == before != []
    assert await service.health() == "unavailable"
    transport = httpx.ASGITransport(app=build_http(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.head("/health")).status_code == (await http.get("/health")).status_code == 503
    replicas.error, replicas.held = None, []
    asleep = stores_of(await service.exposition.text())
    assert asleep == [line for line in before if "_total" in line] != [], "of what is held, nothing is left"


async def test_counters_never_fall() -> None:
    """A replica that does not answer for once, or is gone, has still done what it did."""
    one, two = (replace(POOL, place=place, cache=CACHE) for place in ("a pid 1", "b pid 2"))
    more = replace(two, cache=replace(CACHE, lookups=9, tokens={"device": 31, "redis": 64}))
    service, replicas = service_of()
    told: list[dict[str, float]] = []
    for held in ([one, two], [one], [one, more], [more], [one, two]):
        replicas.held = list(held)
        found = read_metrics((await service.exposition.text()).decode())
        counters = {
            name: value for name, value in found.items() if name.startswith("turnout_cache_") and "_total" in name
        }
        assert all(value >= before for last in told[-1:] for name, before in last.items() for value in [counters[name]])
        told.append(counters)
    assert [each['turnout_cache_lookups_total{pool="demo"}'] for each in told[:4]] == [14, 14, 16, 16]
    assert told[3]['turnout_cache_tokens_total{pool="demo",tier="device"}'] == 61


async def test_a_new_ingress_leaves_out_what_older_replicas_counted() -> None:
    service, replicas = service_of()
    replicas.held = [replace(POOL, place="a", cache=CACHE, began=1000.0, now=9000.0)]
    lookups = 'turnout_cache_lookups_total{pool="demo"}'
    assert read_metrics((await service.exposition.text()).decode())[lookups] == 0
    replicas.held = [replace(replicas.held[0], cache=replace(CACHE, lookups=10))]
    assert read_metrics((await service.exposition.text()).decode())[lookups] == 3


@pytest.mark.parametrize(
    ("body", "expected"), [({}, "exact"), ({"cache": "exact"}, "exact"), ({"cache": "lossy"}, "lossy")]
)
def test_a_body_says_whether_kept_values_may_have_lost_something(body: dict[str, Any], expected: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    jobs = completion_job({"prompt": ["a", "b"], **body}), chat_job({**chat, **body})
    assert {call.cache for job in jobs for call in job.calls} == {expected}


def test_an_unknown_cache_class_is_refused() -> None:
    with pytest.raises(TurnoutError, match=r"^cache: must be one of exact, lossy \(got 'fast'\)$") as caught:
        completion_job({"prompt": "a", "cache": "fast"})
    assert caught.value.field == "cache"
