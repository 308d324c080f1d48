"""The generator as a process, against a gRPC and an HTTP server that refuse every third request."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

import grpc
import pytest

from deployments import grpc_messages
from experiments.load.records import LoadResult, Plan
from turnout.calls import Chunk, TokenOut
from turnout.proto import generation_pb2 as pb
from turnout.proto.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from turnout.types import TokenKind

TOKENS = 4


class Servicer(GenerationServicer):
    def __init__(self) -> None:
        self.asked = count()
        self.requests: list[pb.GenerateRequest] = []

    async def StreamGenerate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateChunk]:
        self.requests.append(request)
        if next(self.asked) % 3 == 2:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        for _ in range(TOKENS):
            chunk = Chunk(0, "a", (TokenOut(5, "a", "large", TokenKind.DECODED),))
            yield grpc_messages.chunk_message("id", "demo", [chunk])


@asynccontextmanager
async def grpc_server() -> AsyncIterator[tuple[int, Servicer]]:
    servicer = Servicer()
    server = grpc.aio.server()
    add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port, servicer
    await server.stop(None)


@asynccontextmanager
async def http_server() -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
    asked = count()
    bodies: list[dict[str, Any]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        if next(asked) % 3 == 2:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            events = [{"choices": [{"delta": {"content": "a"}}], "usage": None}] * TOKENS
            events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS}})
            lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
            writer.write(lines.encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], bodies
    server.close()
    await server.wait_closed()


async def generate(plan: Plan) -> LoadResult:
    command = [sys.executable, "-m", "experiments.load.generator"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate(json.dumps(asdict(plan)).encode())
    assert process.returncode == 0
    return LoadResult.from_dict(json.loads(output))


def plan(client: str, port: int) -> Plan:
    return Plan(client, f"127.0.0.1:{port}", "constant", 20.0, 0.45, 0, ("2+2", "3+3"), "demo", TOKENS)


def check(result: LoadResult, refusal: str) -> None:
    assert len(result.records) == 9
    errors = [record.error for record in result.records]
    assert errors.count(refusal) == 3
    assert errors.count(None) == 6
    for record in result.records:
        if record.error is None:
            assert record.tokens == TOKENS
            assert record.first_s is not None
            assert record.last_s is not None
            assert record.scheduled_s <= record.sent_s <= record.first_s <= record.last_s
    assert result.client_cpu > 0


@pytest.mark.timeout(60)
async def test_over_grpc() -> None:
    async with grpc_server() as (port, servicer):
        check(await generate(plan("grpc", port)), "RESOURCE_EXHAUSTED")
    assert {request.model for request in servicer.requests} == {"demo"}
    assert {request.sampling.max_tokens for request in servicer.requests} == {TOKENS}


@pytest.mark.timeout(60)
async def test_over_http() -> None:
    async with http_server() as (port, bodies):
        check(await generate(plan("http", port)), "HTTP 429")
    assert {body["messages"][0]["content"] for body in bodies} == {"2+2", "3+3"}
    assert all(body["stream"] and body["max_tokens"] == TOKENS for body in bodies)
