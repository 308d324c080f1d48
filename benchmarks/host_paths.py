"""Ways of a request through a pool of free models: the pool alone, HTTP and gRPC, without a socket or Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from benchmarks.asgi_client import post
from benchmarks.host_clock import Clock, lighten
from benchmarks.token_path import LocalHandle
from deployments.grpc_server import GrpcServicer
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica, load_engine
from deployments.remote import RemoteBackend
from deployments.service import GenerationService
from pool.local_pool import LocalPool
from turnout.calls import Chunk, GenerateCall
from turnout.config import TurnoutConfig
from turnout.proto import generation_pb2 as pb
from turnout.types import SamplingParams

MODEL, METHOD, PROMPT = "demo", "plain", "What is 69*9-32*6+44?"


class FreePool:
    """The demo pair with free layers, and the front ends over it, all in this process.

    Args:
        steps: tokens of every answer.
        seconds: that a forward takes, without using the processor.
    """

    def __init__(self, steps: int, seconds: float) -> None:
        config = TurnoutConfig.demo()
        config = config.model_copy(update={"kvstore": config.kvstore.model_copy(update={"url": "off"})})
        self.clock = Clock()
        self._steps = steps
        self._pools: list[LocalPool] = []

        def load(name: str, config: TurnoutConfig) -> Any:
            pool = load_engine(name, config)
            assert isinstance(pool, LocalPool)
            self._pools.append(pool)
            for model in pool.engines.values():
                lighten(model, self.clock, seconds)
            return pool

        replica = PoolReplica(MODEL, config, load)
        service = GenerationService(config, {MODEL: RemoteBackend(MODEL, LocalHandle(replica))}, Metrics())
        self._service, self._app, self._grpc = service, build_http(service), GrpcServicer()
        self._grpc.service = service

    @property
    def pool(self) -> LocalPool:
        """What answers."""
        return self._pools[0]

    async def close(self) -> None:
        """End its threads."""
        await self.pool.close()

    async def _all(self, rows: int, one: Callable[[int], Awaitable[int]]) -> int:
        return sum(await asyncio.gather(*map(one, range(rows))))

    def _call(self, number: int) -> GenerateCall:
        sampling = SamplingParams(temperature=0.0, max_tokens=self._steps, ignore_eos=True, seed=0)
        return GenerateCall(f"r{number}", MODEL, sampling, prompt=PROMPT, method=METHOD)

    async def through_pool(self, rows: int) -> int:
        """Requests to the pool; chunks are counted as they come out of it."""

        async def one(number: int) -> int:
            count = 0
            async for event in self.pool.generate(self._call(number)):
                count += isinstance(event, Chunk)
            return count

        return await self._all(rows, one)

    async def through_service(self, rows: int) -> int:
        """Requests to the service, over the replica."""

        async def one(number: int) -> int:
            count = 0
            async for batch in self._service.stream(self._call(number)):
                count += sum(isinstance(event, Chunk) for event in batch)
            return count

        return await self._all(rows, one)

    async def through_http(self, rows: int) -> int:
        """Streams over HTTP: the ASGI application, without a socket."""
        wanted = {"model": MODEL, "prompt": PROMPT, "max_tokens": self._steps, "temperature": 0, "stream": True}
        body = json.dumps(wanted | {"ignore_eos": True, "decoding": {"method": METHOD}}).encode()

        async def one(_: int) -> int:
            events = 0

            def take(message: Mapping[str, Any]) -> None:
                nonlocal events
                events += b'"text"' in message.get("body", b"")

            await post(self._app, "/v1/completions", body, take)
            return events

        return await self._all(rows, one)

    async def through_grpc(self, rows: int) -> int:
        """Streams over gRPC: the servicer, its messages in bytes, without a socket."""
        sampling = pb.Sampling(temperature=0.0, max_tokens=self._steps, ignore_eos=True)
        request = pb.GenerateRequest(model=MODEL, prompt=PROMPT, method=METHOD, sampling=sampling).SerializeToString()

        async def one(_: int) -> int:
            count = 0
            async for message in self._grpc.StreamGenerate(request, _Context()):
                count += bool(message.SerializeToString())
            return count

        return await self._all(rows, one)


class _Context:
    """A call without metadata; an error of it is raised here."""

    def invocation_metadata(self) -> tuple[()]:
        """None was sent."""
        return ()

    def set_code(self, code: Any) -> None:
        """No error is expected."""
        raise RuntimeError(str(code))
