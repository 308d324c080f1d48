"""A routed pool behind the service and its HTTP endpoints, without a cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from router.summary import read_log
from tests.deployments.in_process import InProcessBackend
from tests.engine.harness import pair_config
from turnout.config import RoutingConfig, TurnoutConfig

SMALL = {"name": "static", "params": {"default": {"method": {"name": "plain", "model": "small"}}}}
LARGE = {"name": "static", "params": {"default": {"method": {"name": "plain", "model": "large"}}}}


def routed(folder: Path, log: Path) -> TurnoutConfig:
    config = pair_config(folder, block_size=8, token_budget=48)
    routing = RoutingConfig(policy=SMALL, shadow={"share": 1, "policy": LARGE}, log={"path": str(log)})  # type: ignore[arg-type]
    pool = config.pools["pair"].model_copy(update={"routing": routing})
    return config.model_copy(update={"pools": {"pair": pool}})


def usage_of(response: httpx.Response, stream: bool) -> tuple[str, dict[str, Any]]:
    """The answer's id and its usage."""
    if not stream:
        answer = response.json()
        return answer["id"], answer["usage"]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    last = json.loads(lines[-2])
    return last["id"], last["usage"]


async def test_every_endpoint_is_routed_explained_logged_and_shadowed_and_no_shadow_is_billed(
    pair_folder: Path, tmp_path: Path
) -> None:
    from engine.pool import LocalPool

    log = tmp_path / "route.jsonl"
    config = routed(pair_folder, log)
    pool = LocalPool.load("pair", config)
    backend = InProcessBackend(PoolReplica("pair", config, lambda _, __: pool))
    service = GenerationService(config, {"pair": backend}, Metrics())
    bodies = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    }
    ids = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_http(service)), base_url="http://test") as http:
        for path, body in bodies.items():
            for stream in (False, True):
                more = {"max_tokens": 4, "stream": stream, "decoding": {"explain": True, "session": "s"}}
                options = {"stream_options": {"include_usage": True}} if stream else {}
                response = await http.post(path, json={**body, **more, **options})
                assert response.status_code == 200, response.text
                call_id, usage = usage_of(response, stream)
                route = usage["turnout"]["route"]
                assert (route["reason"], route["features"]["max_tokens"]) == ("no rule fits", 4)
                assert set(usage["turnout"]["models"]) == {"small"}
                ids.append(call_id)
                async with asyncio.timeout(30):
                    while pool.stats().shadows:
                        await asyncio.sleep(0)
        refused = await http.post("/v1/completions", json={"prompt": "hi", "decoding": {"params": {"model": "small"}}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "decoding.params")
        counters = (await http.get("/metrics")).text
    assert 'turnout_generated_tokens_total{model="small"}' in counters
    assert 'turnout_generated_tokens_total{model="large"}' not in counters
    await pool.close()
    entries = list(read_log(log))
    for kind in ("request", "shadow"):
        assert [entry["request_id"] for entry in entries if entry["kind"] == kind] == ids
    assert {entry["outcome"]["large_share"] for entry in entries if entry["kind"] == "shadow"} == {1.0}
    assert {entry["session"] for entry in entries} == {"s"}
