"""Bodies: large ones are parsed beside the event loop, slow ones are few."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from starlette.exceptions import HTTPException

from deployments.bodies import LARGE, MOST_SLOW, Bodies, parsed
from deployments.schemas import completion_job, read_json
from tests.batches.house import House as HouseOfBatches
from tests.deployments.access.kit import house, served
from turnout.config import parse_config
from turnout.errors import Code, TurnoutError


class Coming:
    """Bodies of requests that come as they are let."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.here = asyncio.Event()

    async def read(self, tenant: str) -> bytes:
        async def receive() -> dict[str, Any]:
            await self.here.wait()
            return {"type": "http.request", "body": b"whole", "more_body": False}

        return await self.bodies.read(Request({"type": "http", "headers": []}, receive), tenant)


async def test_a_tenant_and_all_together_have_only_so_many_slow_bodies() -> None:
    """Those that have been slow for longest make room for others: of the tenant's own, then of whoever has most."""
    coming = Coming(Bodies(100, slow_s=0.0, most_s=60.0))

    async def begin(tenant: str, number: int) -> list[asyncio.Task[bytes]]:
        reads = []
        for _ in range(number):
            reads.append(asyncio.create_task(coming.read(tenant)))
            for _ in range(10):  # slow at once, and before the next
                await asyncio.sleep(0)
        return reads

    def left(reads: list[asyncio.Task[bytes]]) -> list[int]:
        return [place for place, read in enumerate(reads) if not read.done()]

    one = await begin("one", MOST_SLOW)
    assert left(one) == list(range(MOST_SLOW // 2, MOST_SLOW))
    other = await begin("other", MOST_SLOW // 2)
    assert (len(left(one)), len(left(other))) == (MOST_SLOW // 2, MOST_SLOW // 2)
    third = await begin("third", 20)
    assert left(third) == list(range(20))
    assert (len(left(one)), len(left(other))) == (MOST_SLOW // 2 - 10, MOST_SLOW // 2 - 10)
    refused = [read.exception() for read in (*one, *other) if read.done()]
    assert {error.code for error in refused if isinstance(error, TurnoutError)} == {Code.RESOURCE_EXHAUSTED}
    coming.here.set()
    whole = await asyncio.gather(*(read for read in (*one, *other, *third) if not read.done()))
    assert (len(refused) + len(whole), set(whole)) == (2 * MOST_SLOW - MOST_SLOW // 2 + 20, {b"whole"})
    assert coming.bodies.slow == {}


async def test_a_body_that_takes_too_long_is_given_up() -> None:
    coming = Coming(Bodies(100, slow_s=0.0, most_s=0.05))
    with pytest.raises(HTTPException) as given_up:
        await coming.read("one")
    assert (given_up.value.status_code, coming.bodies.slow) == (408, {})


@contextmanager
def half_sent(url: str, key: str) -> Iterator[socket.socket]:
    """A request whose body does not come."""
    at = httpx.URL(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 4000\r\n\r\n{{"
    with socket.create_connection((at.host, at.port)) as connection:
        connection.settimeout(20)
        connection.sendall(head.encode())
        yield connection


def test_limits_are_looked_at_before_a_body_is_read(tmp_path: Path) -> None:
    tenants: dict[str, dict[str, Any]] = {"one": {"concurrency": 1}, "poor": {"budget": {"amount": 0.5}}}
    with house(tmp_path, tenants) as made, served(made.service) as server:
        keys, account = made.keys, made.service.admission._accounts
        good = {"prompt": "hi", "model": "demo", "max_tokens": 2}
        with httpx.Client(timeout=30, headers={"Authorization": f"Bearer {keys['poor']}"}) as client:
            assert client.post(f"{server.url}/v1/completions", json=good).status_code == 200
        with half_sent(server.url, keys["poor"]) as over_budget:
            assert over_budget.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        with half_sent(server.url, keys["one"]):
            while "one" not in account or not account["one"].reading.total():
                time.sleep(0.01)
            with half_sent(server.url, keys["one"]) as second:
                assert second.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        while account["one"].reading.total():
            time.sleep(0.01)
        with httpx.Client(timeout=30, headers={"Authorization": f"Bearer {keys['one']}"}) as client:
            assert client.post(f"{server.url}/v1/completions", json=good).status_code == 200


def where(_: bytes) -> str:
    return threading.current_thread().name


async def test_only_a_large_body_is_parsed_in_a_thread_of_its_own() -> None:
    here = threading.current_thread().name
    assert await parsed(b"x" * LARGE, where) == here
    assert (await parsed(b"x" * (LARGE + 1), where)).startswith("large bodies")


async def test_what_is_wrong_with_a_large_body_is_said_as_of_a_small_one() -> None:
    for size in (10, LARGE):
        for body in (b'{"prompt": "%s\\ud800"}', b'{"prompt": "%s", "top_p": 2}'):
            with pytest.raises(TurnoutError, match=r"prompt|top_p"):
                await parsed(body % (b"x" * size), lambda data: completion_job(read_json(data)))
    # A whole pair is a character as any other.
    job = await parsed(b'{"prompt": "%s\\ud83d\\ude80"}' % (b"x" * LARGE), lambda data: completion_job(read_json(data)))
    assert str(job.calls[0].prompt).endswith("x\N{ROCKET}")


def test_a_body_has_four_mebibytes_where_nobody_says_otherwise() -> None:
    models = {name: {"path": "none"} for name in ("small", "large")}
    config = parse_config({"models": models, "pools": {"p": {"small": "small", "large": "large"}}})
    assert config.server.max_body_bytes == 4 << 20


GZIP = gzip.compress(b'{"model": "demo", "prompt": "x", "max_tokens": 1}')
PLAIN = gzip.decompress(GZIP)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/batches", "/v1/files"])
@pytest.mark.parametrize(
    ("codings", "named"),
    [
        (["gzip"], "gzip"),
        (["identity, br"], "br"),
        (["identity", "zstd"], "zstd"),
        (["GZIP, gzip"], "GZIP"),
        (["deflate; q=1"], "deflate; q=1"),
    ],
)
async def test_an_encoded_body_is_refused_by_its_encoding(
    tmp_path: Path, path: str, codings: list[str], named: str
) -> None:
    service = HouseOfBatches(tmp_path)
    headers = [("Content-Encoding", coding) for coding in codings] + [("Authorization", "Bearer a")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://test") as client:
        answer = await client.post(path, content=GZIP, headers=headers)
    assert (answer.status_code, answer.headers["Accept-Encoding"]) == (415, "identity")
    error = answer.json()["error"]
    assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, "invalid_request_error")
    assert f"Content-Encoding: {named!r} is not supported" in error["message"]


async def test_a_body_that_says_it_is_not_encoded_is_read(tmp_path: Path) -> None:
    service = HouseOfBatches(tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://test") as client:
        for codings in ([], ["identity"], ["Identity, identity"], [""], ["identity", "identity"]):
            headers = [("Content-Encoding", coding) for coding in codings] + [("Authorization", "Bearer a")]
            answer = await client.post("/v1/completions", content=PLAIN, headers=headers)
            assert answer.status_code == 200


async def test_a_body_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    service = HouseOfBatches(tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://test") as client:
        headers = {"Authorization": "Bearer a"}
        answer = await client.post("/v1/completions", content=codecs.BOM_UTF8 + PLAIN, headers=headers)
        assert answer.status_code == 200
        wanted = {"input_file_id": "file-none", "endpoint": "/v1/completions", "metadata": {"a": "b"}}
        data = codecs.BOM_UTF8 + json.dumps(wanted).encode()
        answer = await client.post("/v1/batches", content=data, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "file_id")
