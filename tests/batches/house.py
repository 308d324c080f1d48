"""A server with batches in this process: OpenAI's client over the real application and a scripted pool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from fastapi import FastAPI, Request

from deployments.access.callers import Caller, caller_of
from deployments.batches.local_backend import LocalBackend
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from tests.deployments.fake_pool import FakePool, load_fake_pool
from turnout.config import TurnoutConfig, parse_config


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
