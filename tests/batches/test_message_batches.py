"""Batches of messages as Anthropic's own client uses them, over the service and without a cluster."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import httpx2
import jsonschema
import pytest

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.openapi.document import PATH as DOCUMENT
from deployments.service import GenerationService
from tests.batches.house import House, begin, jsonl, line
from turnout.config import parse_config

PATH = "/v1/messages/batches"


def asked(custom_id: str, prompt: str = "short", **params: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": prompt}]
    return {"custom_id": custom_id, "params": {"model": "demo", "messages": said, "max_tokens": 3, **params}}


def web(house: House, tenant: str = "default") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {tenant}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(house.app), base_url="http://test", headers=headers)


async def created(client: httpx.AsyncClient, *requests: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(PATH, json={"requests": requests})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ended(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            batch = (await client.get(f"{PATH}/{batch_id}")).json()
            if batch["processing_status"] == "ended":
                return dict(batch)
            await asyncio.sleep(0.02)


async def results(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    lines = [json.loads(each) for each in (await client.get(batch["results_url"])).text.split("\n") if each]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each["result"] for each in lines}


async def test_each_request_has_a_result(house: House) -> None:
    async with web(house) as client:
        batch = await created(client, asked("a"), asked("bad", max_tokens=-1), asked("b", stream=True))
        assert batch["id"].startswith("msgbatch_")
        assert (batch["type"], batch["ended_at"], batch["results_url"]) == ("message_batch", None, None)
        assert sum(batch["request_counts"].values()) == 3
        batch = await ended(client, batch["id"])
        assert batch["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 2, "canceled": 0, "expired": 0}
        assert batch["created_at"] <= batch["ended_at"] < batch["expires_at"]
        found = await results(client, batch)
        message = found["a"]["message"]
        assert (message["type"], message["content"][0]["text"], message["usage"]["output_tokens"]) == (
            "message",
            "aba",
            3,
        )
        assert {name: each["type"] for name, each in found.items()} == {
            "a": "succeeded",
            "bad": "errored",
            "b": "errored",
        }
        for name, field in (("bad", "max_tokens"), ("b", "stream")):
            error = found[name]["error"]
            assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
            assert field in error["error"]["message"]


async def test_anthropics_client_reads_what_is_written(house: House) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with web(house) as http:
        transport = httpx2.ASGITransport(app=house.app)
        theirs = anthropic.DefaultAsyncHttpxClient(transport=transport, base_url="http://test")
        client = anthropic.AsyncAnthropic(base_url="http://test", auth_token="default", http_client=theirs)
        batch = await client.messages.batches.create(requests=[asked("a"), asked("b")])
        await ended(http, batch.id)
        batch = await client.messages.batches.retrieve(batch.id)
        assert (batch.processing_status, batch.request_counts.succeeded) == ("ended", 2)
        texts = {
            each.custom_id: each.result.message.content[0].text
            async for each in await client.messages.batches.results(batch.id)
        }
        assert texts == {"a": "aba", "b": "aba"}
        assert [each.id async for each in client.messages.batches.list(limit=1)] == [batch.id]
        assert (await client.messages.batches.delete(batch.id)).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError, match="there is no"):
            await client.messages.batches.retrieve(batch.id)
        files = (await http.get("/v1/files")).json()["data"]
        assert files == []


async def test_what_was_cancelled_or_came_too_late_has_a_result(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async with web(house) as client:
        batch = await created(client, asked("waits", "wait"))
        refused = await client.get(f"{PATH}/{batch['id']}/results")
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (await client.delete(f"{PATH}/{batch['id']}")).status_code == 400
        cancelled = (await client.post(f"{PATH}/{batch['id']}/cancel")).json()
        assert cancelled["processing_status"] in ("canceling", "ended")
        batch = await ended(client, batch["id"])
        assert batch["request_counts"] == {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 1, "expired": 0}
        assert await results(client, batch) == {"waits": {"type": "canceled"}}
        assert (await client.post(f"{PATH}/{batch['id']}/cancel")).status_code == 400

        monkeypatch.setattr("deployments.batches.message_batches_http.WINDOW_S", 1)
        batch = await ended(client, (await created(client, asked("waits", "wait")))["id"])
        assert batch["request_counts"] == {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 1}
        assert await results(client, batch) == {"waits": {"type": "expired"}}


async def test_lists_have_pages_and_each_tenant_its_own(house: House) -> None:
    async with web(house) as client, web(house, "other") as other:
        made = [(await created(client, asked("a")))["id"] for _ in range(3)]
        await begin(house.client(), jsonl([line("not a message")]))
        order = [each["id"] for each in (await client.get(PATH)).json()["data"]]
        assert sorted(order) == sorted(made)
        first = (await client.get(PATH, params={"limit": 2})).json()
        assert (first["first_id"], first["last_id"], first["has_more"]) == (*order[:2], True)
        rest = (await client.get(PATH, params={"after_id": first["last_id"]})).json()
        assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (order[2:], False)
        back = (await client.get(PATH, params={"before_id": order[2], "limit": 1})).json()
        assert ([each["id"] for each in back["data"]], back["has_more"]) == ([order[1]], True)
        assert (await client.get(PATH, params={"after_id": "msgbatch_x"})).status_code == 400
        assert (await other.get(PATH)).json()["data"] == []
        for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            answer = await other.request(method, f"{PATH}/{made[0]}{path}")
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": [{"custom_id": "a"}]}, "params"),
        ({"requests": [asked("a"), asked("a")]}, "requests[1].custom_id"),
        ({"requests": [asked("no spaces")]}, "requests[0].custom_id"),
        ({"requests": [asked("x" * 65)]}, "requests[0].custom_id"),
        ({"requests": [asked("a")], "endpoint": "/v1/messages"}, "endpoint"),
    ],
)
async def test_bad_bodies_are_refused_by_field(house: House, body: dict[str, Any], told: str) -> None:
    async with web(house) as client:
        answer = await client.post(PATH, json=body)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_answers_fit_the_document(house: House) -> None:
    async with web(house) as client:
        told = (await client.get(DOCUMENT)).json()

        def check(answer: Any, path: str, method: str) -> None:
            schema = told["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
            validator = jsonschema.Draft202012Validator({**schema, "components": told["components"]})
            assert [error.message for error in validator.iter_errors(answer)] == []

        batch = await created(client, asked("a"))
        check(batch, PATH, "post")
        check(await ended(client, batch["id"]), f"{PATH}/{{batch_id}}", "get")
        check((await client.get(PATH)).json(), PATH, "get")
        check((await client.delete(f"{PATH}/{batch['id']}")).json(), f"{PATH}/{{batch_id}}", "delete")


async def test_without_batches_a_server_says_so() -> None:
    models = {"small": {"path": "none"}, "large": {"path": "none"}}
    config = parse_config({"models": models, "pools": {"demo": {"small": "small", "large": "large"}}})
    transport = httpx.ASGITransport(build_http(GenerationService(config, {}, Metrics())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for method, path in (("POST", PATH), ("GET", f"{PATH}/msgbatch_1/results")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["type"]) == (404, "error")
            assert "no section batches" in answer.json()["error"]["message"]
