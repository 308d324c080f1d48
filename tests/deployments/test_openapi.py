"""The OpenAPI document beside the application: the same paths, and answers that fit it."""

from __future__ import annotations

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
from deployments.service import GenerationService
from tests.deployments.in_process import make_config, make_service
from turnout.batches_config import BatchesConfig

UNTOLD = {PATH, "/v1/files{rest}", "/v1/batches{rest}"}


@pytest.fixture
async def http() -> Any:
    app = build_http(make_service())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        yield client


def test_every_route_stands_in_the_document_and_every_operation_is_served() -> None:
    app = build_http(make_service())
    with warnings.catch_warnings(action="ignore"):  # of names that this document is not made with
        paths = get_openapi(title="", version="", routes=app.routes)["paths"]
    served = {(method, path) for path, methods in paths.items() if path not in UNTOLD for method in methods}
    told = {(method, path) for path, methods in document(batches=False)["paths"].items() for method in methods}
    assert served == told


def test_all_references_lead_somewhere() -> None:
    for batches in (False, True):
        told = document(batches, keys=True)
        assert told["security"] == [{"key": []}, {}]
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
    ("get", "/status", {}),
    ("post", "/v1/completions", {"prompt": "x", "n": 2, "logprobs": 1, "echo": True, "decoding": {"tokens": True}}),
    ("post", "/v1/completions", {"prompt": "x", "temperature": 3}),
    ("post", "/v1/chat/completions", CHAT | {"decoding": {"tokens": True}}),
    ("post", "/v1/chat/completions", {"messages": []}),
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
