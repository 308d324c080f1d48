"""Tasks over HTTP and gRPC: shapes, refusals by field, limits of tenants, deadlines, what is billed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from decoding.tasks.base import PACKAGE
from deployments.access.admission import estimated_tokens
from deployments.http import build_http
from deployments.openapi.document import PATH
from deployments.service import GenerationService
from tests.deployments.access.kit import house, served
from tests.deployments.test_metrics import values
from tests.deployments.test_request_log import Logged
from turnout.client import AsyncClient, Client
from turnout.embed_calls import TaskCall
from turnout.errors import Code, TurnoutError
from turnout.registry import names

SCORE = {"prompt": "ab", "completions": ["c"]}
FAILS = {"text": "fail"}
PLAIN: dict[str, Any] = {"params": {"text": "a"}}


async def test_every_task_is_listed_with_schemas_and_answers_fit_the_document(http: httpx.AsyncClient) -> None:
    document = (await http.get(PATH)).json()
    listed = (await http.get("/v1/tasks")).json()
    assert [each["name"] for each in listed["data"]] == names(PACKAGE)
    for each in listed["data"]:
        assert each["summary"].endswith(".")
        for schema in (each["params"], each["result"]):
            jsonschema.Draft202012Validator.check_schema(schema)
            assert not [name for name in schema if name.startswith("x-")]
        assert each["params"]["additionalProperties"] is False
    body = {"model": "demo", "params": SCORE}
    answer = await http.post("/v1/tasks/score", json=body, headers={"x-request-id": "mine"})
    assert answer.json()["id"] == "task-mine"
    assert answer.json()["usage"]["prompt_tokens"] > 0
    operation = document["paths"]["/v1/tasks/{name}"]["post"]
    for schema, value in (
        (operation["requestBody"]["content"]["application/json"]["schema"], body),
        (operation["responses"]["200"]["content"]["application/json"]["schema"], answer.json()),
        (document["paths"]["/v1/tasks"]["get"]["responses"]["200"]["content"]["application/json"]["schema"], listed),
    ):
        validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        assert [error.message for error in validator.iter_errors(value)] == []


@pytest.mark.parametrize(
    ("name", "body", "status", "field"),
    [
        ("none", {}, 404, "name"),
        ("score", {"model": "none", "params": SCORE}, 404, "model"),
        ("score", {"params": {**SCORE, "top": 99}}, 400, "params.top"),
        ("score", {"params": {"prompt": "a"}}, 400, "params.completions"),
        ("score", {"params": {**SCORE, "colour": 1}}, 400, "params.colour"),
        ("score", {"params": SCORE, "colour": 1}, 400, "colour"),
        ("score", {"params": [1]}, 400, "params"),
        ("score", {"params": SCORE, "deadline_s": 0}, 400, "deadline_s"),
        ("score", {"params": SCORE, "deadline_s": "soon"}, 400, "deadline_s"),
        ("compress", {"params": {"text": ""}}, 400, "params.text"),
        ("compress", {"params": {"text": "a", "window": -1}}, 400, "params.window"),
    ],
)
async def test_bad_input_is_refused_by_name(
    http: httpx.AsyncClient, name: str, body: dict[str, Any], status: int, field: str
) -> None:
    answer = await http.post(f"/v1/tasks/{name}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), answer.text
    assert answer.json()["error"]["message"].startswith(field)


async def test_a_task_ends_with_its_deadline(http: httpx.AsyncClient) -> None:
    body = {"params": {"text": "wait"}, "deadline_s": 0.05}
    answer = await http.post("/v1/tasks/compress", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (504, "deadline_s")


async def test_a_task_whose_caller_gives_up_is_given_up(service: GenerationService) -> None:
    call = TaskCall("r", "demo", "compress", {"text": "wait"})
    task = asyncio.create_task(service.task(call))
    for _ in range(20):  # turns of the loop, after which it waits in the pool
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(service.held().values())


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"model": "nope"}, "NOT_FOUND", "model"),
        ({"made_up_by_the_caller": 1}, "INVALID_ARGUMENT", "other"),
        ({"params": {}}, "INVALID_ARGUMENT", "params"),
    ],
)
async def test_a_task_that_is_refused_is_counted_once_and_its_texts_are_no_line(
    tmp_path: Path, change: dict[str, Any], code: str, field: str
) -> None:
    logged = Logged(tmp_path)
    service, secret = logged.service, {"params": {"text": "a secret text"}}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_http(service)), base_url="http://test") as http:
        assert (await http.post("/v1/tasks/compress", json=secret)).status_code == 200
        answer = await http.post("/v1/tasks/compress", json={**PLAIN, **change})
    assert answer.status_code in (400, 404), answer.text
    found = values(service.metrics)
    assert found["turnout_refusals_total"] == {(code, field): 1}
    lines = logged.lines()
    assert [(line["kind"], line["outcome"]) for line in lines if line["outcome"] == "OK"] == [("task", "OK")]
    assert "secret" not in json.dumps(lines)


def test_a_tenants_limits_hold_and_what_is_read_is_billed(tmp_path: Path) -> None:
    tenants: dict[str, dict[str, Any]] = {"acme": {}, "slow": {"requests_per_minute": 1}, "other": {"pools": ["x"]}}
    with house(tmp_path, tenants) as made, served(made.service) as server:
        with Client(server.address, api_key=made.keys["acme"]) as client:
            assert client.task("score", SCORE, model="demo") == {"params": SCORE}
            with pytest.raises(TurnoutError, match="too long"):  # after it has read something
                client.task("compress", FAILS, model="demo")
            for name, field in (("none", "name"), ("score", "params.prompt"), ("", "name")):
                with pytest.raises(TurnoutError) as refused:
                    client.task(name, {}, model="demo")
                assert refused.value.field == field
            with pytest.raises(TurnoutError) as refused:
                client.task("compress", {"text": "wait"}, model="demo", deadline_s=0.05)
            assert refused.value.code is Code.DEADLINE_EXCEEDED
        with Client(server.address, api_key=made.keys["slow"]) as client:
            client.task("score", SCORE, model="demo")
            with pytest.raises(TurnoutError) as refused:
                client.task("score", SCORE, model="demo")
            assert refused.value.code is Code.RESOURCE_EXHAUSTED
        with Client(server.address, api_key=made.keys["other"]) as client, pytest.raises(TurnoutError) as refused:
            client.task("score", SCORE, model="demo")
        assert refused.value.code is Code.PERMISSION_DENIED
        with Client(server.address, api_key="tk_x_y") as client, pytest.raises(TurnoutError) as refused:
            client.task("score", SCORE, model="demo")
        assert refused.value.code is Code.UNAUTHENTICATED

        async def alike() -> None:
            async with AsyncClient(server.address, api_key=made.keys["acme"]) as client:
                assert await client.task("score", SCORE, model="demo") == {"params": SCORE}

        asyncio.run(alike())
        read = [record for record in made.records() if record.tenant == "acme" and record.prompt_tokens]
        assert {record.kind for record in read} == {"score"}
        failed = [record for record in read if record.outcome == "OUT_OF_RANGE"]
        assert [record.prompt_tokens for record in failed] == [len(json.dumps(FAILS))]
        assert len([record for record in read if record.outcome == "OK"]) == len(read) - 1 == 2
        assert len({record.prompt_tokens for record in read if record not in failed}) == 1


def test_what_is_read_is_estimated_before_it_is_let_in() -> None:
    params = {"prompt": "abcde", "completions": ["abcd", "a"], "top": 3, "parents": {"a": "abcd"}}
    assert estimated_tokens(TaskCall("r", "m", "score", params)) == 2 + 1 + 1 + 1
