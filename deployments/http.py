"""The OpenAI-compatible HTTP endpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deployments import answering
from deployments.answering import Output
from deployments.faults import guarded, respell
from deployments.openai_format import (
    HTTP_STATUS,
    ChatFormat,
    CompletionFormat,
    Format,
    error_body,
    model_object,
    usage_object,
)
from deployments.schemas import Job, chat_job, completion_job, read_json
from deployments.service import GenerationService
from turnout.calls import Usage
from turnout.errors import Code, TurnoutError

MAX_BODY_BYTES = 32 << 20
RETRY_AFTER_S = 1


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed when the client leaves, not when memory is collected."""

    def __init__(self, events: AsyncGenerator[str, None], source: AsyncGenerator[Output, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends or the client leaves."""
        # A generator that never began does not run its own clean-up: close what it would have closed.
        async with aclosing(self._source), aclosing(self._events):
            await super().__call__(scope, receive, send)


def build_http(service: GenerationService) -> FastAPI:
    """The ASGI application over a service."""
    app = FastAPI(title="Turnout", docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())
    _add_error_handlers(app)

    @app.get("/v1/models")
    async def list_models() -> Response:
        models = await service.models()
        return JSONResponse({"object": "list", "data": [model_object(model, started) for model in models]})

    @app.get("/v1/models/{name}")
    async def get_model(name: str) -> Response:
        service.model_name(name)
        found = [model for model in await service.models() if model.name == name]
        return JSONResponse(model_object(found[0], started))

    @app.get("/v1/methods")
    async def list_methods() -> Response:
        methods = [
            {
                "name": method.name,
                "summary": method.summary,
                "lossless": method.lossless,
                "params": method.params_schema,
            }
            for method in await service.methods()
        ]
        return JSONResponse({"object": "list", "data": methods})

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _respond(service, request, completion_job, CompletionFormat())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _respond(service, request, chat_job, ChatFormat())

    @app.get("/healthz")
    async def health() -> Response:
        status = await service.health()
        return JSONResponse({"status": status}, status_code=503 if status == "unavailable" else 200)

    @app.get("/status")
    async def status() -> Response:
        return JSONResponse(await _status(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _status(service: GenerationService) -> dict[str, Any]:
    """By pool, what its replicas hold; under `errors`, why a pool does not answer."""
    pools: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, stats in (await service.stats()).items():
        if isinstance(stats, TurnoutError):
            errors[name] = stats.message
        else:
            pools[name] = finite([asdict(each) for each in stats])
    return {"pools": pools, "errors": errors}


def finite(value: Any) -> Any:
    """The same value for JSON, which has no number that is infinite or none: null instead."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def _respond(
    service: GenerationService, request: Request, translate: Callable[[dict[str, Any]], Job], form: Format
) -> Response:
    call_id = form.prefix + uuid4().hex
    data = await _body(request)
    with guarded(call_id):
        job = translate(read_json(data)).named(call_id)
        try:
            return await _run(service, job, form, call_id)
        except TurnoutError as error:
            raise respell(error, job.spelling) from None


async def _run(service: GenerationService, job: Job, form: Format, call_id: str) -> Response:
    head = {"id": call_id, "created": int(time.time()), "model": service.model_name(job.calls[0].model)}
    logprobs = job.calls[0].sampling.logprobs is not None
    if job.stream:
        outputs = answering.stream(service, job)
        # Refusals come before the first output: wait for it, so that they get their own status code.
        first = await anext(outputs)
        events = _Events({**head, "object": form.part}, form, job, logprobs)
        return EventStream(events.write(first, outputs), outputs)
    chunks, usage = await answering.answer(service, job)
    choices = [form.choice(chunk, logprobs) for chunk in chunks]
    return JSONResponse({**head, "object": form.whole, "choices": choices, "usage": usage_object(usage)})


class _Events:
    """Writes outputs as server-sent events."""

    def __init__(self, head: dict[str, Any], form: Format, job: Job, logprobs: bool) -> None:
        self._head = head
        self._form = form
        self._job = job
        self._logprobs = logprobs

    async def write(self, first: Output, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[str, None]:
        try:
            with guarded(self._head["id"]):
                for event in self._render(first):
                    yield event
                async for output in outputs:
                    for event in self._render(output):
                        yield event
        except TurnoutError as error:
            yield _event(error_body(respell(error, self._job.spelling)))
            return
        yield "data: [DONE]\n\n"

    def _render(self, output: Output) -> list[str]:
        usage = {"usage": None} if self._job.include_usage else {}
        if isinstance(output, Usage):
            return [_event({**self._head, "choices": [], "usage": usage_object(output)})] if usage else []
        deltas = [self._form.delta(chunk, self._logprobs) for chunk in output]
        return [_event({**self._head, "choices": [delta], **usage}) for delta in deltas]


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _body(request: Request) -> bytes:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY_BYTES:
            raise HTTPException(413, f"body: at most {MAX_BODY_BYTES} bytes")
    return bytes(parts)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(TurnoutError)
    async def refused(_: Request, error: TurnoutError) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if error.code is Code.RESOURCE_EXHAUSTED else None
        return JSONResponse(error_body(error), status_code=HTTP_STATUS[error.code], headers=headers)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)
