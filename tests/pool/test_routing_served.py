"""A routed pool behind the service and its HTTP endpoints, without a cluster."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.access.usage_totals import RecordFiles
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from router.summary import read_log
from tests.deployments.in_process import InProcessBackend
from tests.engine.harness import pair_config
from turnout.access_config import AccessConfig, UsageConfig
from turnout.calls import GenerateCall
from turnout.config import RoutingConfig, TurnoutConfig
from turnout.telemetry_config import AuditConfig, TelemetryConfig
from turnout.types import SamplingParams

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
    from pool.local_pool import LocalPool

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


async def test_there_are_as_many_records_as_answers_though_each_is_shadowed_and_audited(
    pair_folder: Path, tmp_path: Path
) -> None:
    from pool.local_pool import LocalPool

    log, usage = tmp_path / "route.jsonl", UsageConfig(folder=str(tmp_path / "usage"))
    telemetry = TelemetryConfig(audit=AuditConfig(share=1.0))
    access = AccessConfig(anonymous="acme", usage=usage)
    config = routed(pair_folder, log).model_copy(update={"access": access, "telemetry": telemetry})
    pool = LocalPool.load("pair", config)
    backend = InProcessBackend(PoolReplica("pair", config, lambda _, __: pool))
    service, spent = GenerationService(config, {"pair": backend}, Metrics()), []
    try:
        for number in range(4):
            call = GenerateCall(f"r{number}", "pair", SamplingParams(max_tokens=6), prompt="hi" * number + "x")
            answer = await service.generate(replace(call, tenant="acme"))
            spent.append((call.request_id, answer.usage.completion_tokens, answer.usage.cost.spent.flops))
            async with asyncio.timeout(30):
                while (stats := pool.stats()).shadows or (stats.audit is not None and stats.audit.running):
                    await asyncio.sleep(0.001)
        assert service.admission.flush()
        records = sorted(RecordFiles(tmp_path / "usage").between(), key=lambda record: record.request_id)
        assert [(each.request_id, each.completion_tokens, each.cost.flops) for each in records] == spent
        used = service.admission.used("acme")
        assert used["tokens"] == sum(each.prompt_tokens + each.completion_tokens for each in records)
        assert used["flops"] == pytest.approx(sum(flops for _, _, flops in spent))
    finally:
        service.close()
        await pool.close()
    stats = pool.stats()
    assert stats.audit is not None
    assert stats.audit.equal + stats.audit.ties == 4, "the audits have not been made"
    assert [each["kind"] for each in read_log(log)].count("shadow") == 4
