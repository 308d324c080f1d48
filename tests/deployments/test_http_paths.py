"""Paths over HTTP: names with slashes, redirects behind a proxy, and HEAD."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import httpx
import pytest
from starlette.types import Message

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from deployments.version_check import begin
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import InProcessBackend, make_service
from turnout import tracing
from turnout.config import TurnoutConfig, parse_config
from turnout.file_names import one_part
from turnout.telemetry_config import TracesConfig

POOL, SMALL, LARGE = "org/pair", "org/models/small", "/checkpoints/large:7b"


def slashed_config() -> TurnoutConfig:
    return parse_config(
        {
            "models": {SMALL: {"path": "none"}, LARGE: {"path": "none"}},
            "pools": {POOL: {"small": SMALL, "large": LARGE}},
        }
    )


def client(config: TurnoutConfig | None = None, **options: Any) -> httpx.AsyncClient:
    service = make_service()
    if config is not None:
        [name] = config.pools
        replica = PoolReplica(name, config, load_fake_pool)
        service = GenerationService(config, {name: InProcessBackend(replica)}, Metrics())
    transport = httpx.ASGITransport(build_http(service), **options)
    return httpx.AsyncClient(transport=transport, base_url="http://inside:8000")


@pytest.mark.parametrize("name", [POOL, SMALL, LARGE])
@pytest.mark.parametrize("escaped", [False, True])
async def test_a_model_whose_name_has_slashes_is_found(name: str, escaped: bool) -> None:
    async with client(slashed_config()) as http:
        answer = await http.get(f"/v1/models/{quote(name, safe='' if escaped else '/')}")
        assert (answer.status_code, answer.json().get("id")) == (200, name)
        done = await http.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 2})
        assert done.json()["model"] == name


async def test_an_unknown_name_with_slashes_is_named() -> None:
    async with client(slashed_config()) as http:
        for path in ("org/none", "org%2Fnone"):
            answer = await http.get(f"/v1/models/{path}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
            assert "'org/none'" in answer.json()["error"]["message"]


def test_spans_of_a_pool_whose_name_has_a_slash_are_in_one_file(tmp_path: Path) -> None:
    tracing.set_up(TracesConfig(share=1.0, exporter="file", path=str(tmp_path)), f"pool-{POOL}")
    try:
        tracing.end(tracing.root("stream", "", model=POOL))
        tracing.flush()
    finally:
        tracing.set_up(None, "")
    [path] = tmp_path.iterdir()
    assert path.name.startswith("pool-org%2Fpair-")
    assert POOL in path.read_text(encoding="utf-8")


def test_different_names_are_different_parts() -> None:
    names = ["a/b", "a%2Fb", "a%252Fb", "a", "a b"]
    assert len({one_part(name) for name in names}) == len(names)
    assert not any("/" in one_part(name) for name in names)
    assert [one_part(name) for name in ("a", "a b", "a-é.1")] == ["a", "a b", "a-é.1"]


def test_what_a_pool_had_is_not_forgotten_with_one_whose_name_begins_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, bytes] = {}

    def put(key: str, value: str, overwrite: bool, namespace: str) -> None:
        kept[key.encode()] = value.encode()

    fakes = {
        "_internal_kv_list": lambda prefix, namespace: [key for key in kept if key.startswith(prefix.encode())],
        "_internal_kv_del": lambda key, namespace: kept.pop(key),
        "_internal_kv_get": lambda key, namespace: kept.get(key.encode()),
        "_internal_kv_put": put,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(f"deployments.version_check.kv.{name}", fake)
    monkeypatch.setattr("deployments.version_check.running_pools", lambda _: {"org", POOL})
    begin("app", {"org": "1", POOL: "2"})
    before = dict(kept)
    begin("app", {"org": "1", POOL: "2"})
    assert kept == before
    begin("app", {"org": "3"})
    assert {key: value for key, value in kept.items() if value == b"2"} == {
        key: value for key, value in before.items() if value == b"2"
    }


READ = ["/health", "/healthz", "/status", "/metrics", "/v1/models", "/v1/models/demo", "/v1/methods", "/openapi.json"]


@pytest.mark.parametrize("path", [*READ, "/console/", "/v1/models/none", "/", "/v1/nothing"])
async def test_head_is_answered_as_get_without_a_body(path: str) -> None:
    """Asked as a server asks: not every one drops the body itself."""
    app = build_http(make_service())
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "HEAD", "path": path, "headers": [], "query_string": b"", "client": None}
    await app(scope, receive, send)
    async with client() as http:
        assert sent[0]["status"] == (await http.get(path)).status_code
        assert (await http.head(path)).content == b""
    assert b"".join(each.get("body", b"") for each in sent[1:]) == b""


async def test_head_is_refused_where_nothing_is_read() -> None:
    async with client() as http:
        assert (await http.head("/v1/completions")).status_code == 405


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/v1/models/", "/v1/models"),
        ("/v1/models/?a=b&c=%2F", "/v1/models?a=b&c=%2F"),
        ("/v1/models/org/pair/", "/v1/models/org/pair"),
        ("/v1/models/org%2Fpair/", "/v1/models/org%2Fpair"),
        ("/v1/models/%2Fcheckpoints%2Flarge%3A7b/", "/v1/models/%2Fcheckpoints%2Flarge%3A7b"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/console", "/console/"),
        ("/", "/console/"),
    ],
)
async def test_redirects_stay_under_the_prefix_that_a_proxy_took_away(path: str, leads_to: str) -> None:
    async with client(slashed_config()) as http:
        led = await http.request("POST" if "chat" in path else "GET", path)
        assert led.status_code == 307
        for outside in ("https://host/turnout", "https://host"):
            assert urljoin(outside + path, led.headers["Location"]) == outside + leads_to


async def test_a_path_without_another_spelling_is_unknown() -> None:
    async with client(slashed_config()) as http:
        for path in ("/v1/nothing/", "/v1/nothing", "/v1/models//", "/v1/models/org%2F"):
            assert (await http.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("headers", "location"),
    [
        ([], "console/"),
        ([("X-Forwarded-Prefix", "/turnout")], "/turnout/console/"),
        ([("X-Forwarded-Prefix", "/a/b/")], "/a/b/console/"),
        ([("X-Forwarded-Prefix", "/outer, /inner")], "/outer/inner/console/"),
        ([("X-Forwarded-Prefix", "/outer"), ("X-Forwarded-Prefix", "/inner")], "/outer/inner/console/"),
        ([("X-Forwarded-Prefix", "/")], "console/"),
        ([("X-Forwarded-Prefix", "//evil.example")], "console/"),
        ([("X-Forwarded-Prefix", "https://evil.example")], "console/"),
        ([("X-Forwarded-Prefix", "/a\\evil.example")], "console/"),
    ],
)
async def test_a_prefix_that_a_proxy_names_is_kept(headers: list[tuple[str, str]], location: str) -> None:
    async with client() as http:
        for path in ("/", "/console"):
            assert (await http.get(path, headers=headers)).headers["Location"] == location


async def test_a_server_that_knows_its_prefix_serves_under_it() -> None:
    async with client(slashed_config(), root_path="/turnout") as http:
        assert (await http.get("/turnout/")).headers["Location"] == "/turnout/console/"
        assert (await http.get("/turnout/v1/models/org/pair")).json()["id"] == POOL
        led = await http.get("/turnout")
        assert urljoin("https://host/turnout", led.headers["Location"]) == "https://host/turnout/"
