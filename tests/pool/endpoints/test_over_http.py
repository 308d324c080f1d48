"""Endpoints behind our own HTTP: what a client sees of tools, errors, health and metrics."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from httpx import ASGITransport

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from tests.deployments.in_process import InProcessBackend
from tests.pool.endpoints.scripted import Server, event, quick, refusal, stream, usage_event, words
from turnout.config import TurnoutConfig, parse_config

CALL = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a": '}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
async def ask_over(site):
    """Makes a client of a pool whose large model is a server."""

    async def made(server: Server, **endpoint: Any) -> httpx.AsyncClient:
        models = {
            "far": {
                "endpoint": {"url": server.url, "model": "m", "retries": 0, **endpoint},
                "price": {"output_usd_per_mtok": 1.0},
            }
        }
        config = parse_config({"models": models, "pools": {"p": {"large": "far"}}})

        def load(name: str, config: TurnoutConfig) -> Any:
            from pool.endpoints.text_pool import load_text_pool

            return quick(load_text_pool(name, config, lambda *_: None))

        replica = PoolReplica("p", config, load)
        service = GenerationService(config, {"p": InProcessBackend(replica)}, Metrics(pools=config.pools))
        site.stack.push_async_callback(replica._pool.close)
        client = httpx.AsyncClient(transport=ASGITransport(build_http(service)), base_url="http://test")
        return await site.stack.enter_async_context(client)

    return made


def body(**values: Any) -> dict[str, Any]:
    return {"model": "p", "messages": [{"role": "user", "content": "hi"}], **values}


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_of_tools_reach_the_client_as_the_endpoint_made_them(site, ask_over, streamed):
    rest = {"index": 0, "function": {"arguments": "1}"}}
    pieces = [event({"tool_calls": [CALL]}), event({"tool_calls": [rest]}), event({}, "tool_calls"), usage_event(5, 4)]
    server = await site.server(stream(*pieces))
    client = await ask_over(server)
    answer = await client.post("/v1/chat/completions", json=body(tools=TOOLS, stream=streamed, tool_choice="auto"))
    assert answer.status_code == 200, answer.text
    assert server.bodies[0]["tools"][0]["function"]["name"] == "f"
    assert "tool_choice" not in server.bodies[0]
    assert "response_format" not in server.bodies[0]
    if not streamed:
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert (call["id"], call["function"]) == ("c1", {"name": "f", "arguments": '{"a": 1}'})
        assert answer.json()["usage"]["turnout"]["cost"]["spent"]["usd"] == pytest.approx(4e-6)
        return
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [part for each in events for part in each["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == '{"a": 1}'
    assert [part["id"] for part in parts if "id" in part] == ["c1"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_refusals_health_and_metrics(site, ask_over):
    limited = refusal(429, {"message": "slow down"}, Retry_After="7")
    wrong = refusal(400, {"message": "too hot", "param": "temperature"})
    server = await site.server(limited, wrong, words("ok", usage=(3, 2)), refusal(500))
    client = await ask_over(server, breaker_failures=1, breaker_open_s=1000)
    answers = [await client.post("/v1/chat/completions", json=body()) for _ in range(5)]
    assert [each.status_code for each in answers] == [429, 400, 200, 503, 503]
    assert answers[0].headers["Retry-After"] == "7"
    assert answers[1].json()["error"]["param"] == "temperature"
    assert len(server.bodies) == 4
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    metrics = (await client.get("/metrics")).text
    for outcome, count in {"limited": 1, "refused": 1, "ok": 1, "failed": 1}.items():
        line = f'turnout_endpoint_requests_total{{model="far",outcome="{outcome}",pool="p"}} {count}.0'
        assert line in metrics
    assert 'turnout_endpoint_breaker{model="far",pool="p",state="open"} 1.0' in metrics
    assert 'turnout_model_usd_total{model="far"} 2e-06' in metrics
    [pool, _] = (await client.get("/v1/models")).json()["data"]
    assert pool["max_model_len"] is None
