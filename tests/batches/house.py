"""A server with batches in this process: OpenAI's client over the real application and a scripted pool."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from fastapi import FastAPI, Request

from deployments.access.callers import Caller, caller_of
from deployments.http import build_http
from deployments.local_backend import LocalBackend
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from tests.deployments.fake_pool import FakePool, load_fake_pool
from turnout.config import TurnoutConfig, parse_config

ENDED = {"completed", "failed", "expired", "cancelled"}


def batch_config(folder: Path, **batches: Any) -> TurnoutConfig:
    return parse_config(
        {
            "models": {"small": {"path": "none"}, "large": {"path": "none"}},
            "pools": {"demo": {"small": "small", "large": "large"}},
            "batches": {"folder": str(folder / "batches"), **batches},
        }
    )


class House:
    """One server process; `tenant` names whose client one is."""

    def __init__(self, folder: Path, **batches: Any) -> None:
        config = batch_config(folder, **batches)
        self.replica = PoolReplica("demo", config, load_fake_pool)
        pool = self.replica._pool
        assert isinstance(pool, FakePool)
        self.pool = pool
        self.service = GenerationService(config, {"demo": LocalBackend(self.replica)}, Metrics())
        self.app: FastAPI = build_http(self.service)

        def caller(request: Request) -> Caller:
            return Caller(tenant=request.headers["authorization"].removeprefix("Bearer "), key_id="k")

        self.app.dependency_overrides[caller_of] = caller

    @asynccontextmanager
    async def open(self) -> AsyncIterator[House]:
        """Work on batches while the context lasts; leaving it is the end of the process."""
        async with self.app.router.lifespan_context(self.app):
            yield self

    def client(self, tenant: str = "default") -> openai.AsyncOpenAI:
        transport = httpx2.ASGITransport(app=self.app)
        http = openai.DefaultAsyncHttpxClient(transport=transport, base_url="http://test/v1")
        return openai.AsyncOpenAI(base_url="http://test/v1", api_key=tenant, max_retries=0, http_client=http)


def line(custom_id: str, prompt: str = "short", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "demo", "prompt": prompt, "max_tokens": 3, **body},
    }


def jsonl(lines: Iterable[dict[str, Any] | str]) -> bytes:
    return "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines).encode()


def read(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(each) for each in data.splitlines()]


async def begin(client: openai.AsyncOpenAI, lines: bytes, **options: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", lines), purpose="batch")
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h", **options}
    return await client.batches.create(input_file_id=file.id, **wanted)


async def ended(client: openai.AsyncOpenAI, batch_id: str, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ENDED:
            return batch
        assert time.monotonic() < deadline, batch.status
        await asyncio.sleep(0.02)


async def content(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return read((await client.files.content(file_id)).content) if file_id is not None else []
