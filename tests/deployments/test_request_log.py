"""The log of requests: one line for each that ended, with nothing that was not asked for; audits; the first span."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.backend import Batch
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.relevance_http import RERANK_PATHS, SCORE_PATHS
from deployments.service import GenerationService
from deployments.telemetry.request_log import AuditLog, RequestLog
from tests.deployments.access.kit import house, served
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import InProcessBackend, make_config, make_service
from tests.deployments.test_metrics import POOL, values
from tests.spans import traced_process
from turnout.calls import Begun, Chunk, GenerateCall, ScoreCall
from turnout.client import Client
from turnout.errors import Code, TurnoutError, invalid
from turnout.pool_stats import AuditDiff, AuditStats, PoolStats
from turnout.telemetry_config import LogsConfig
from turnout.types import SamplingParams

READING_S = 0.1
DIFF = AuditDiff("r9", "speculative", 0, 3, (7, " a"), (8, " b"), 0.75, "large")


class Logged:
    """A service over a fake pool, and the lines it has written."""

    def __init__(self, folder: Path, **logs: Any) -> None:
        config = make_config()
        self.replica = PoolReplica("demo", config, load_fake_pool)
        self.log = RequestLog(LogsConfig(path=str(folder / "requests.jsonl"), **logs))
        backends: Any = {"demo": InProcessBackend(self.replica)}
        self.service = GenerationService(config, backends, Metrics(pools=config.pools), self.log)
        self.folder = folder

    def lines(self) -> list[dict[str, Any]]:
        self.log.close()
        return self.written()

    def written(self) -> list[dict[str, Any]]:
        """Those that are in the file already."""
        return lines_in(self.folder)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("requests*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(prompt: str = "a secret question", **changes: Any) -> GenerateCall:
    values: dict[str, Any] = {"request_id": "r1", "model": "demo", "sampling": SamplingParams(max_tokens=4)}
    return GenerateCall(prompt=prompt, **{**values, **changes})


async def test_each_way_to_end_is_one_line(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    service = logged.service
    await service.generate(call(request_id="whole"))
    assert [batch async for batch in service.stream(call(request_id="streamed"))]
    async with aclosing(service.stream(call("slow", request_id="left"))) as batches:
        await anext(batches)
    with pytest.raises(TurnoutError):
        await service.generate(call(request_id="refused", model="nope"))
    with pytest.raises(TurnoutError, match="internal error"):
        await service.generate(call("crash", request_id="broken"))
    await service.score(ScoreCall("scored", "demo", "a", ("b",)))
    task = asyncio.create_task(service.generate(call("wait", request_id="cancelled")))
    while not logged.replica.stats().requests:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    lines = {line["request_id"]: line for line in logged.lines()}
    outcomes = {name: (line["kind"], line["outcome"], line["model"]) for name, line in lines.items()}
    assert outcomes == {
        "whole": ("generate", "OK", "demo"),
        "streamed": ("stream", "OK", "demo"),
        "left": ("stream", "CANCELLED", "demo"),
        "refused": ("generate", "NOT_FOUND", ""),
        "broken": ("generate", "INTERNAL", "demo"),
        "scored": ("score", "OK", "demo"),
        "cancelled": ("generate", "CANCELLED", "demo"),
    }
    assert lines["refused"]["field"] == "model"
    whole = lines["whole"]
    assert (whole["tenant"], whole["method"], whole["completion_tokens"]) == ("default", "entropy_adaptive", 4)
    assert 0 <= whole["queue_s"] <= whole["first_token_s"] <= whole["wall_s"] < 60
    assert "secret" not in json.dumps(list(lines.values()))
    assert "trace_id" not in whole


async def test_of_an_answer_that_is_cut_short_is_told_what_was_sent(tmp_path: Path) -> None:
    log = RequestLog(LogsConfig(path=str(tmp_path / "requests.jsonl")))
    with house(tmp_path, {"acme": {}}, log=log) as made:
        caller = replace(call("slow", request_id="left"), tenant="acme")
        async with aclosing(made.service.stream(caller)) as batches:
            sent = [token for event in await anext(batches) if isinstance(event, Chunk) for token in event.tokens]
    log.close()
    [line] = lines_in(tmp_path)
    assert (line["outcome"], line["completion_tokens"]) == ("CANCELLED", len(sent))
    assert line["prompt_tokens"] > 0
    assert "method" not in line


async def test_closing_the_service_writes_what_waits(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    await logged.service.generate(call(request_id="the last"))
    logged.service.close()
    assert [line["request_id"] for line in logged.written()] == ["the last"]


class SlowReader(InProcessBackend):
    """Says at once that the prompt is read and how the call was routed, and is slow with the first token."""

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        yield (Begun(3),)
        read = asyncio.Event()
        asyncio.get_running_loop().call_later(READING_S, read.set)
        await read.wait()
        async for batch in super().stream(call):
            yield batch


class Audited(InProcessBackend):
    """Has found a wrong token."""

    async def stats(self) -> list[PoolStats]:
        return [replace(POOL, audit=AuditStats(mismatches=1, last=(DIFF,)))]


async def test_status_counts_mismatches_and_shows_nothing_of_an_answer(tmp_path: Path) -> None:
    service = GenerationService(make_config(), {"demo": Audited(Logged(tmp_path).replica)}, Metrics())
    transport = httpx.ASGITransport(build_http(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        [pool] = (await http.get("/status")).json()["pools"]["demo"]
    assert (pool["audit"]["mismatches"], pool["audit"]["last"]) == (1, [])


async def test_what_comes_before_the_first_token_is_no_token(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    service = GenerationService(make_config(), {"demo": SlowReader(logged.replica)}, Metrics(), logged.log)
    assert [batch async for batch in service.stream(call(request_id="streamed"))]
    (line,) = logged.lines()
    assert line["first_token_s"] >= READING_S


async def test_prompts_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    logged = Logged(tmp_path, texts=True)
    await logged.service.generate(call())
    await logged.service.generate(replace(call(), prompt=(1, 2)))
    await logged.service.generate(replace(call(), context="a secret context"))
    assert [line["prompt"] for line in logged.lines()] == ["a secret question", [1, 2], "a secret question"]
    assert [line.get("context") for line in logged.lines()] == [None, None, "a secret context"]


def test_without_a_file_lines_go_through_serves_log() -> None:
    serve, records = logging.getLogger("ray.serve"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    before = serve.level
    serve.addHandler(handler)
    serve.setLevel(logging.INFO)
    try:
        log = RequestLog(LogsConfig())
        log.write({"request_id": "r1", "outcome": "OK"})
        log.close()
    finally:
        serve.removeHandler(handler)
        serve.setLevel(before)
    (record,) = records
    assert record.thread != threading.get_ident()  # a slow log holds up nobody's stream
    assert record.__dict__["ray_serve_extra_fields"] == {"turnout_request_id": "r1", "turnout_outcome": "OK"}


async def test_a_callers_trace_begins_in_the_ingress_and_its_id_is_in_the_log(tmp_path: Path) -> None:
    trace = "c" * 32
    logged = Logged(tmp_path)
    transport = httpx.ASGITransport(build_http(logged.service))
    with traced_process(tmp_path / "spans", share=0.0) as spans:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for flag in ("01", "00"):
                answer = await http.post(
                    "/v1/completions",
                    json={"prompt": ["hi", "ho"], "max_tokens": 2},
                    headers={"traceparent": f"00-{trace}-{'d' * 16}-{flag}"},
                )
                assert answer.status_code == 200, answer.text
            refused = await http.post("/v1/completions", json={"prompt": "hi", "temperature": 9})
            assert refused.status_code == 400
        found = spans.all()
    assert [(span["name"], span["attributes"]["outcome"]) for span in found] == [("generate", "OK")] * 2
    assert {span["parent_id"] for span in found} == {f"0x{'d' * 16}"}
    lines = logged.lines()
    assert [line.get("trace_id") for line in lines] == [trace, trace, None, None, None]


async def test_a_mismatch_is_logged_once_and_counted(tmp_path: Path) -> None:
    logged = Logged(tmp_path)
    found = POOL
    logged.replica._pool.stats = lambda: found  # type: ignore[method-assign]
    await logged.service.exposition.text()
    wrong = AuditStats(equal=6, ties=1, mismatches=1, last=(DIFF,))
    found = replace(POOL, audit=wrong)
    for _ in range(3):
        await logged.service.exposition.text()
    assert values(logged.service.metrics)["turnout_audits_total"]["demo", "mismatch"] == 1
    (line,) = logged.lines()
    assert {name: line[name] for name in ("kind", "request_id", "position", "wrote", "expected", "margin_nats")} == {
        "kind": "audit", "request_id": "r9", "position": 3, "wrote": 7, "expected": 8, "margin_nats": 0.75
    }  # fmt: skip


def test_texts_of_wrong_tokens_are_written_where_they_are_asked_for() -> None:
    for texts in (False, True):
        entries: list[dict[str, Any]] = []
        audited = AuditLog(entries.append, texts)
        audited.take({"demo": [PoolStats(0, 0, 0, 0, 0, 0, 0.0, {}, audit=AuditStats(last=(DIFF,)))]})
        assert [entry.get("wrote_text") for entry in entries] == [" a" if texts else None]


@pytest.mark.parametrize("clock_ahead_s", [0.0, -700.0, 700.0])
def test_what_another_ingress_has_written_down_is_not_written_again(clock_ahead_s: float) -> None:
    now = time.time() + clock_ahead_s
    entries: list[dict[str, Any]] = []
    audited = AuditLog(entries.append)
    found = AuditStats(last=tuple(replace(DIFF, found_at=now - ago) for ago in (1000, 1)))
    audited.take({"demo": [PoolStats(0, 0, 0, 0, 0, 0, 0.0, {}, audit=found, now=now)]})
    assert [entry["request_id"] for entry in entries] == [DIFF.request_id]


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"temperature": 9}, "INVALID_ARGUMENT", "temperature"),
        ({"made_up_by_the_caller": 1}, "INVALID_ARGUMENT", "other"),
        ({"model": "nope"}, "NOT_FOUND", "model"),
        ({"prompt": ""}, "INVALID_ARGUMENT", "prompt"),
        ({"decoding": {"method": "nope"}}, "NOT_FOUND", "method"),
    ],
)
async def test_what_is_refused_is_counted_once_wherever(
    tmp_path: Path, change: dict[str, Any], code: str, field: str
) -> None:
    service = Logged(tmp_path).service
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_http(service)), base_url="http://test") as http:
        answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, **change})
    assert answer.status_code in (400, 404), answer.text
    found = values(service.metrics)
    assert found["turnout_refusals_total"] == {(code, field): 1}
    assert {outcome: count for (_, outcome), count in found["turnout_requests_total"].items()} == {code: 1}


READING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    **{path: {"text_1": "a", "text_2": "b"} for path in SCORE_PATHS},
    **{path: {"query": "a", "documents": ["b"]} for path in RERANK_PATHS},
}


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"model": "nope"}, "NOT_FOUND", "model"),
        ({"made_up_by_the_caller": 1}, "INVALID_ARGUMENT", "other"),
        ({"truncate_prompt_tokens": -5}, "INVALID_ARGUMENT", "truncate_prompt_tokens"),
    ],
)
@pytest.mark.parametrize("path", READING)
async def test_what_only_reads_and_is_refused_is_counted_once_as_well(
    tmp_path: Path, path: str, change: dict[str, Any], code: str, field: str
) -> None:
    service = Logged(tmp_path).service
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_http(service)), base_url="http://test") as http:
        assert (await http.post(path, json=READING[path])).status_code == 200
        answer = await http.post(path, json={**READING[path], **change})
    assert answer.status_code in (400, 404), answer.text
    found = values(service.metrics)
    assert found["turnout_refusals_total"] == {(code, field): 1}
    outcomes = {outcome: count for (_, outcome), count in found["turnout_requests_total"].items()}
    assert outcomes == {"OK": 1, code: 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_cannot_be_told_is_a_refused_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    logged = Logged(tmp_path)

    async def unknown(call: GenerateCall) -> list[int]:
        raise invalid("model", "is an endpoint")

    monkeypatch.setattr(logged.replica._pool, "tokens", unknown)
    body = {"prompt": "hi", "return_token_ids": True, "stream": stream}
    transport = httpx.ASGITransport(build_http(logged.service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 400
    assert values(logged.service.metrics)["turnout_refusals_total"] == {("INVALID_ARGUMENT", "model"): 1}
    assert values(logged.service.metrics)["turnout_requests_total"] == {("", "INVALID_ARGUMENT"): 1}


def test_what_is_refused_unread_is_a_line_too(tmp_path: Path) -> None:
    """Over HTTP and gRPC alike: whose key is tried, and who floods."""
    log = RequestLog(LogsConfig(path=str(tmp_path / "requests.jsonl")))
    tenants: dict[str, dict[str, Any]] = {"one": {"requests_per_minute": 1}, "many": {}}
    with house(tmp_path, tenants, log=log) as made, served(made.service) as server:
        keys, path = made.keys, f"{server.url}/v1/completions"
        good = {"prompt": "hi", "model": "demo", "max_tokens": 2}
        wrong = f"tk_{made.key_id('many')}_wrong"
        for key, sent in (
            (keys["one"], good),
            (keys["one"], good),
            (wrong, good),
            ("tk_x_y", good),
            (keys["many"], []),
        ):
            httpx.post(path, json=sent, timeout=30, headers={"Authorization": f"Bearer {key}"})
        large = b" " * (made.service.max_body_bytes + 1)
        httpx.post(path, content=large, timeout=30, headers={"Authorization": f"Bearer {wrong}"})
        for key in (keys["one"], wrong):
            with Client(server.address, api_key=key) as client, pytest.raises(TurnoutError):
                client.generate("hi", model="demo")
        made.service.close()
    (written,) = tmp_path.glob("requests*.jsonl")
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    one, many = made.key_id("one"), made.key_id("many")
    limit = ("one", "RESOURCE_EXHAUSTED", "tenant.requests_per_minute", one)
    refused = [line for line in lines if line["kind"] == "refused"]
    assert [tuple(line.get(name) for name in ("tenant", "outcome", "field", "key_id")) for line in refused] == [
        limit,
        ("other", "UNAUTHENTICATED", "authorization", many),
        ("other", "UNAUTHENTICATED", "authorization", None),
        ("many", "INVALID_ARGUMENT", "body", many),
        ("other", "UNAUTHENTICATED", "authorization", many),
        limit,
        ("other", "UNAUTHENTICATED", "authorization", many),
    ]  # fmt: skip
    assert [line["outcome"] for line in lines if line not in refused] == ["OK"]
    assert refused[0]["request_id"].startswith("cmpl-")
    assert not any(key.split("_", 2)[2] in json.dumps(lines) for key in keys.values())


@pytest.mark.parametrize(
    ("limit_s", "deadline_s", "outcome"),
    [(60.0, 0.01, "CALLER_DEADLINE"), (0.01, None, "DEADLINE_EXCEEDED"), (0.01, 60.0, "DEADLINE_EXCEEDED")],
)
async def test_a_deadline_of_the_callers_own_is_told_from_the_servers(
    limit_s: float, deadline_s: float | None, outcome: str
) -> None:
    """Only the server's is a fault that somebody is woken for."""
    service = make_service(request_timeout_s=limit_s)
    with pytest.raises(TurnoutError) as late:
        await service.generate(call("wait", deadline_s=deadline_s))
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert values(service.metrics)["turnout_requests_total"] == {("demo", outcome): 1}


async def test_so_is_that_of_a_call_that_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service()
    monkeypatch.setattr(service._backends["demo"], "score", lambda _: asyncio.Event().wait())
    with pytest.raises(TurnoutError) as late:
        await service.score(ScoreCall("r", "demo", "a", ("b",), deadline_s=0.01))
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert values(service.metrics)["turnout_requests_total"] == {("demo", "CALLER_DEADLINE"): 1}


async def test_only_what_a_model_answers_is_counted_as_requests(tmp_path: Path) -> None:
    """As over gRPC, whose other calls have never been."""
    service = Logged(tmp_path).service
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_http(service)), base_url="http://test") as http:
        for path in ("/v1/models/nope", "/v1/batches/nope", "/v1/nothing"):
            assert (await http.get(path)).status_code in (400, 404)
        assert values(service.metrics).get("turnout_requests_total", {}) == {}
        large = b" " * (service.max_body_bytes + 1)
        assert (await http.post("/v1/completions", content=large)).status_code == 413
    assert values(service.metrics)["turnout_requests_total"] == {("", "RESOURCE_EXHAUSTED"): 1}
    assert values(service.metrics)["turnout_refusals_total"] == {("RESOURCE_EXHAUSTED", "body"): 1}
