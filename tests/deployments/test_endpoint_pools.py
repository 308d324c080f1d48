"""A pool of endpoints alone on a cluster: the ingress answers it, and no replica of it exists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.app import QUIET, build_app
from deployments.pool_options import all_bundles
from tests.deployments.conftest import poll
from tests.pool.endpoints.scripted import Server, Site, event, refusal, stream, words
from turnout.config import TurnoutConfig, parse_config
from turnout.errors import TurnoutError

APP = "endpoints"


def config_of(near: str, far: str, **pool: Any) -> TurnoutConfig:
    models = {
        name: {"endpoint": {"url": url, "model": "m", "retries": 0}, "price": {"output_usd_per_mtok": 1.0}}
        for name, url in {"near": near, "far": far}.items()
    }
    return parse_config(
        {"models": models, "pools": {"chat": {"large": "near", "small": "far", "failover": {}, **pool}}}
    )


@pytest.fixture
async def servers(cluster: tuple[TurnoutConfig, Any]) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """The endpoint that is asked first, and a client of what is served."""
    async with AsyncExitStack() as stack:
        site = Site(stack)
        held = stream(event({"content": "never "}), holds=True)
        near = await site.server(words("one ", "two", usage=(10, 2)), held, refusal(500))
        far = await site.server(words("three", usage=(10, 1)))
        app = build_app(config_of(near.url, far.url))
        await asyncio.to_thread(serve.run, app, name=APP, route_prefix=f"/{APP}", logging_config=QUIET)
        try:
            at = cluster[0].server
            base = f"http://{at.http_host}:{at.http_port}/{APP}"
            yield near, await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60))
        finally:
            serve.delete(APP, _blocking=False)
            poll(lambda: APP not in serve.status().applications, "the application is gone", 60.0)


def body(**values: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **values}


async def test_the_ingress_streams_cancels_fails_over_and_counts(servers: tuple[Server, httpx.AsyncClient]) -> None:
    near, client = servers
    assert list(serve.status().applications[APP].deployments) == ["ingress"]

    asked = body(stream=True, stream_options={"include_usage": True})
    lines = (await client.post("/v1/chat/completions", json=asked)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"]) == "one two"
    assert events[-1]["usage"]["turnout"]["cost"]["spent"]["usd"] == pytest.approx(2e-6)

    async with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as answer:
        async for line in answer.aiter_lines():
            if "never" in line:
                break
    await asyncio.wait_for(near.closed.wait(), 30)

    answered = (await client.post("/v1/chat/completions", json=body())).json()
    assert answered["choices"][0]["message"]["content"] == "three"
    assert answered["usage"]["turnout"]["cost"]["spent"]["usd"] == pytest.approx(1e-6)
    assert len(near.bodies) == 3

    stats = await serve.get_deployment_handle("ingress", APP).inside.remote()
    [inside] = stats["chat"]
    assert inside.place
    assert {each.model: each.requests for each in inside.endpoints} == {
        "near": {"ok": 1, "cancelled": 1, "failed": 1},
        "far": {"ok": 1},
    }
    metrics = (await client.get("/metrics")).text
    assert 'turnout_endpoint_requests_total{model="near",outcome="ok",pool="chat"} 1.0' in metrics
    assert (await client.get("/health")).json()["status"] == "ok"


def test_it_asks_nothing_of_nodes_and_has_no_number_of_replicas() -> None:
    config = config_of("http://a/v1", "http://b/v1")
    assert not config.replica_pools
    assert not all_bundles(config)
    for field, value in {"replicas": 2, "autoscaling": {"max_replicas": 2}}.items():
        with pytest.raises(TurnoutError, match="the ingress answers it") as refused:
            config_of("http://a/v1", "http://b/v1", **{field: value})
        assert refused.value.field == f"pools.chat.{field}"
