"""An OpenAI-compatible server of scripts, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pool.endpoints.text_pool import TextPool, load_text_pool
from turnout.calls import ChatMessage, Chunk, GenerateCall, Usage
from turnout.config import parse_config
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Server:
    """Answers each request by the next script, the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.closed = asyncio.Event()  # a client has gone before the answer's end
        self.running = 0
        self.most_running = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await script(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.closed.set()
            raise
        finally:
            self.running -= 1

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Server]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_post("/v1/completions", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()


def event(delta: dict[str, Any], finish: str | None = None, index: int = 0, logprobs: Any = None) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage_event(prompt: int, completion: int, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


def words(*texts: str, logprob: float | None = None, usage: tuple[int, ...] = (10, 3), tail: bytes = b"") -> Script:
    """Streams texts, each with a log-probability where one is asked for."""
    pieces = [event({"role": "assistant", "content": ""})]
    for text in texts:
        said = None if logprob is None else {"content": [{"token": text, "logprob": logprob, "top_logprobs": []}]}
        pieces.append(event({"content": text}, logprobs=said))
    pieces += [event({}, "stop"), *([usage_event(*usage)] if usage else []), tail, b"data: [DONE]\n\n"]
    return stream(*pieces)


def stream(*pieces: bytes, dies: bool = False, holds: bool = False) -> Script:
    """Sends bytes as they are; `dies`: then cuts the connection; `holds`: then sends nothing more."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if holds:
            await asyncio.Event().wait()
        if dies:
            assert request.transport is not None
            request.transport.close()
        return response

    return script


def refusal(status: int, error: Any = None, **headers: str) -> Script:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = json.dumps({"error": error}) if error is not None else "<html>Bad Gateway</html>"
        return web.Response(status=status, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return script


def text_pool(small: Server | None, large: Server, pool: dict[str, Any] | None = None, **endpoint: Any) -> TextPool:
    """A pool of one or two endpoints."""
    models: dict[str, Any] = {"big": {"endpoint": {"url": large.url, "model": "m", **endpoint}}}
    roles = {"large": "big"}
    if small is not None:
        models["little"] = {"endpoint": {"url": small.url, "model": "m", **endpoint}}
        roles["small"] = "little"
    config = parse_config({"models": models, "pools": {"p": {**roles, **(pool or {})}}})
    return load_text_pool("p", config, no_model)


def no_model(name: str, config: Any) -> Any:
    raise AssertionError("no model is computed here")


async def at_once(seconds: float) -> None:
    """A pause that takes no time."""
    await asyncio.sleep(0)


def quick(pool: TextPool) -> TextPool:
    """The pool without the pauses between tries."""
    for model in pool.models_by_name.values():
        model._pause = at_once  # type: ignore[attr-defined]
    return pool


def ask(text: str = "hi", **values: Any) -> GenerateCall:
    sampling = values.pop("sampling", {})
    given: dict[str, Any] = {"model": "p", "messages": (ChatMessage("user", text),), **values}
    return GenerateCall("r", sampling=SamplingParams(**{"seed": 1, **sampling}), **given)


async def answer(pool: TextPool, call: GenerateCall) -> tuple[list[Chunk], Usage]:
    events = [each async for each in pool.generate(call)]
    chunks = [each for each in events if isinstance(each, Chunk)]
    assert isinstance(events[-1], Usage)
    return chunks, events[-1]


def text_of(chunks: list[Chunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


class Site:
    """Servers and pools of a test, closed at its end."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack

    async def server(self, *scripts: Any) -> Server:
        return await self.stack.enter_async_context(Server(*scripts).served())

    def pool(self, small: Server | None, large: Server, pool: dict[str, Any] | None = None, **endpoint: Any) -> Any:
        made = quick(text_pool(small, large, pool, **endpoint))
        self.stack.push_async_callback(made.close)
        return made


async def refused(pool: Any, call: Any) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        await answer(pool, call)
    return caught.value
