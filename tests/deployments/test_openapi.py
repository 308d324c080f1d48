"""The OpenAPI document beside the application: the same paths, and answers that fit it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.openapi.utils import get_openapi

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.openapi.document import PATH, document
from deployments.openapi.events import DONE
from deployments.service import GenerationService
from tests.deployments.fake_pool import TOOL_CALL
from tests.deployments.in_process import make_config
from turnout.batches_config import BatchesConfig
from turnout.console_config import ConsoleConfig

UNTOLD = {PATH, "/v1/files{rest}", "/v1/batches{rest}", "/v1/messages/batches{rest}"}


@pytest.mark.parametrize("everything", [False, True])
def test_every_route_stands_in_the_document_and_every_operation_is_served(tmp_path: Path, everything: bool) -> None:
    parts = {"batches": BatchesConfig(folder=str(tmp_path)), "console": ConsoleConfig(experiments=str(tmp_path))}
    config = make_config().model_copy(update=parts if everything else {})
    app = build_http(GenerationService(config, {}, Metrics()))
    with warnings.catch_warnings(action="ignore"):  # of names that this document is not made with
        paths = get_openapi(title="", version="", routes=app.routes)["paths"]
    served = {(method, path) for path, methods in paths.items() if path not in UNTOLD for method in methods}
    paths = document(batches=everything, experiments=everything)["paths"]
    told = {(method, path) for path, methods in paths.items() for method in methods}
    assert served == told


def test_all_references_lead_somewhere() -> None:
    for batches in (False, True):
        told = document(batches, keys=True)
        assert told["security"] == [{"key": []}, {"x-api-key": []}, {}]
        for ref in _refs(told):
            at: Any = told
            for part in ref.removeprefix("#/").split("/"):
                at = at[part]
            assert at


def _refs(value: Any) -> list[str]:
    if isinstance(value, list):
        return [ref for each in value for ref in _refs(each)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [ref for each in value.values() for ref in _refs(each)]


CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
ASKED = [
    ("get", "/v1/models", {}),
    ("get", "/v1/models/{name}", {}),
    ("get", "/v1/methods", {}),
    ("get", "/v1/tenant", {}),
    ("get", "/v1/tenants", {}),
    ("get", "/healthz", {}),
    ("get", "/health", {}),
    ("get", "/version", {}),
    ("get", "/load", {}),
    ("get", "/status", {}),
    ("get", "/v1/status", {}),
    ("post", "/v1/completions", {"prompt": "x", "n": 2, "logprobs": 1, "echo": True, "decoding": {"tokens": True}}),
    ("post", "/v1/completions", {"prompt": "x", "temperature": 3}),
    ("post", "/v1/chat/completions", CHAT | {"decoding": {"tokens": True}}),
    ("post", "/v1/chat/completions", {"messages": []}),
    ("post", "/v1/completions", {"prompt": ["xyz", "x"], "prompt_logprobs": 2, "return_token_ids": True}),
    ("post", "/v1/chat/completions", CHAT | {"prompt_logprobs": 2, "return_token_ids": True}),
    ("post", "/v1/messages", {"messages": CHAT["messages"], "decoding": {"tokens": True}}),
    ("post", "/v1/messages", {"messages": []}),
    ("post", "/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
]


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
async def test_answers_fit_the_document(http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any]) -> None:
    told = (await http.get(PATH)).json()
    more = {"json": {"model": "demo", "max_tokens": 3, **body}} if body else {}
    answer = await http.request(method, path.replace("{name}", "demo"), **more)
    operation = told["paths"][path][method]
    response = operation["responses"].get(str(answer.status_code), {})
    if "$ref" in response:
        response = told["components"]["responses"][response["$ref"].rpartition("/")[2]]
    schema = response["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": told["components"]})
    assert [error.message for error in validator.iter_errors(answer.json())] == []


async def test_reports_fit_the_document(tmp_path: Path) -> None:
    report = {"title": "T", "points": [{"label": "a", "quality": 0.5, "cost": 0.1}], "left out": 1}
    (tmp_path / "one.json").write_text(json.dumps(report), encoding="utf-8")
    config = make_config().model_copy(update={"console": ConsoleConfig(experiments=str(tmp_path))})
    transport = httpx.ASGITransport(build_http(GenerationService(config, {}, Metrics())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        told = (await client.get(PATH)).json()
        for path in ("/v1/experiments", "/v1/experiments/{name}"):
            answer = await client.get(path.replace("{name}", "one"))
            schema = told["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            validator = jsonschema.Draft202012Validator({**schema, "components": told["components"]})
            assert [error.message for error in validator.iter_errors(answer.json())] == []


async def test_headers_that_requests_may_have_stand_in_the_document(http: httpx.AsyncClient) -> None:
    told = (await http.get(PATH)).json()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
        parameters = told["paths"][path]["post"]["parameters"]
        schemas = {each["name"]: each["schema"] for each in parameters if each["in"] == "header"}
        assert set(schemas) == {"x-turnout-priority", "x-request-id", "traceparent"}
        for priority in (*schemas["x-turnout-priority"]["enum"], "unknown"):
            body = {
                "max_tokens": 1,
                **({"messages": CHAT["messages"]} if path != "/v1/completions" else {"prompt": "x"}),
            }
            answer = await http.post(path, json=body, headers={"x-turnout-priority": priority})
            assert answer.status_code == (400 if priority == "unknown" else 200)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SCORED = {"logprobs": 1, "echo": True, "decoding": {"tokens": True}}
STREAMS = {
    "completions": ("completions", {"prompt": "x"}, True),
    "completions, usage": ("completions", {"prompt": "x", **COUNTED}, True),
    "completions, everything": ("completions", {"prompt": ["x", "yz"], "n": 2, **SCORED, **COUNTED}, True),
    "completions, ids": ("completions", {"prompt": ["x", "yz"], "return_token_ids": True, **COUNTED}, True),
    "chat, ids": ("chat/completions", {**CHAT, "return_token_ids": True, **COUNTED}, True),
    "completions, no alternatives": ("completions", {"prompt": "x", "logprobs": 0, "echo": True}, True),
    "completions, a fault": ("completions", {"prompt": "crash", "max_tokens": 9, **COUNTED}, False),
    "chat": ("chat/completions", {"messages": CHAT["messages"]}, True),
    "chat, everything": ("chat/completions", {**CHAT, "n": 2, "decoding": {"tokens": True}, **COUNTED}, True),
    "chat, a tool": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "tool"}], "tools": TOOLS, "max_tokens": len(TOOL_CALL), **COUNTED},
        True,
    ),
    "chat, a fault": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "crash"}], "tools": TOOLS, "max_tokens": 9},
        False,
    ),
}


def faults_of(told: dict[str, Any], path: str, data: list[str]) -> list[str]:
    """What is wrong with events beside the document, their JSON included, which a validator leaves alone."""
    schema = told["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    [done, held] = schema["properties"]["data"]["anyOf"]
    assert done == {"const": DONE}
    event = jsonschema.Draft202012Validator({**schema, "components": told["components"]})
    inside = jsonschema.Draft202012Validator({**held["contentSchema"], "components": told["components"]})
    found = [error for each in data for error in event.iter_errors({"event": "message", "data": each})]
    found += [error for each in data if each != DONE for error in inside.iter_errors(json.loads(each))]
    return [error.message for error in found]


@pytest.mark.parametrize("name", STREAMS)
async def test_events_fit_the_document(http: httpx.AsyncClient, name: str) -> None:
    path, body, ends_well = STREAMS[name]
    told = (await http.get(PATH)).json()
    answer = await http.post(f"/v1/{path}", json={"model": "demo", "max_tokens": 3, "stream": True, **body})
    assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    assert len(data) >= 2
    assert faults_of(told, f"/v1/{path}", data) == []
    assert [each == DONE for each in data] == [False] * (len(data) - 1) + [ends_well]
    assert ["error" in each for each in map(json.loads, data[:-1])] == [False] * (len(data) - 1)
    assert ends_well or set(json.loads(data[-1])) == {"error"}
    assert ("tool_calls" in answer.text) == (name == "chat, a tool")
    assert ('"prompt_tokens_details"' in answer.text) == (ends_well and "stream_options" in body)


@pytest.mark.parametrize("said", ["hi", "crash", "tool"])
async def test_events_of_messages_fit_the_document(http: httpx.AsyncClient, said: str) -> None:
    told = (await http.get(PATH)).json()
    tools = [{"name": "weather", "input_schema": {"type": "object"}}] if said == "tool" else []
    asked = {"messages": [{"role": "user", "content": said}], "tools": tools, "decoding": {"tokens": True}}
    body = {"model": "demo", "max_tokens": len(TOOL_CALL), "stream": True, **asked}
    answer = await http.post("/v1/messages", json=body)
    schema = told["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    inside = schema["properties"]["data"]["contentSchema"]
    validator = jsonschema.Draft202012Validator({**inside, "components": told["components"]})
    lines = answer.text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event")]
    assert names == [event["type"] for event in events]
    assert set(names) < set(schema["properties"]["event"]["enum"])
    assert [error.message for event in events for error in validator.iter_errors(event)] == []
    assert not validator.is_valid(events[0] | {"more": 1})
    assert events[-1]["type"] == ("error" if said == "crash" else "message_stop")
    assert any("tool_use" in str(event) for event in events) == (said == "tool")
    reported = sum(len(event.get("turnout", {}).get("tokens", ())) for event in events)
    assert reported == (3 if said == "crash" else len(TOOL_CALL))


async def test_an_event_that_the_document_does_not_know_would_be_found(http: httpx.AsyncClient) -> None:
    told = (await http.get(PATH)).json()
    body = {"model": "demo", "prompt": "x", "max_tokens": 1, "stream": True}
    answer = await http.post("/v1/completions", json=body)
    chunk = json.loads(answer.text.partition("\n\n")[0].removeprefix("data: "))
    assert faults_of(told, "/v1/completions", [json.dumps(chunk)]) == []
    assert faults_of(told, "/v1/completions", [json.dumps(chunk | {"more": 1})])
    assert faults_of(told, "/v1/chat/completions", [json.dumps(chunk)])


async def test_a_field_that_the_document_does_not_know_would_be_found(http: httpx.AsyncClient) -> None:
    told = (await http.get(PATH)).json()
    schema = {"$ref": "#/components/schemas/ModelList", "components": told["components"]}
    models = (await http.get("/v1/models")).json()
    models["data"][0]["more"] = 1
    with pytest.raises(jsonschema.ValidationError, match="more"):
        jsonschema.Draft202012Validator(schema).validate(models)


async def test_bad_query_parameters_are_refused_in_openais_shape(tmp_path: Path) -> None:
    config = make_config().model_copy(update={"batches": BatchesConfig(folder=str(tmp_path))})
    service = GenerationService(config, {}, Metrics())
    transport = httpx.ASGITransport(app=build_http(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for query, field in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")):
            answer = await client.get(f"/v1/files?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
