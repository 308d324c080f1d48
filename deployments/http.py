"""The OpenAI-compatible HTTP endpoints."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

import turnout
from decoding.parts import slots_in
from deployments import embeddings_http, relevance_http, tasks_http, tokens_http
from deployments import fan_out as answering
from deployments.access import http as access
from deployments.access.callers import Caller, CallerOf, OperatorOf, credentials
from deployments.answer_extras import check_readable
from deployments.backend import Batch
from deployments.batches import http as batch_routes
from deployments.bodies import ENCODED, TOO_LARGE, TOO_LATE, Bodies
from deployments.console import http as console
from deployments.decoding_body import request_parts
from deployments.faults import guarded, respell
from deployments.health import HealthReport
from deployments.http_paths import HeadAsGet, redirect_slashes
from deployments.messages import http as messages
from deployments.metrics import OTHER
from deployments.openai_format import (
    HTTP_STATUS,
    error_body,
    model_object,
)
from deployments.openapi import answers, extras
from deployments.openapi import document as openapi
from deployments.request_fields import REQUEST_ID_HEADER
from deployments.request_fields import request_id as checked_id
from deployments.responses import http as response_routes
from deployments.schemas import Job
from deployments.service import GenerationService
from deployments.surface import Head, Surface
from deployments.surfaces import CHAT, COMPLETIONS, RESPONSES, WRITING
from turnout.calls import PoolStats
from turnout.errors import Code, TurnoutError, invalid, not_found
from turnout.message_size import check_answer_bytes

RETRY_AFTER_S = 1.0
# What a page of another origin may send, and read: no cookies, which nothing here looks at.
CORS: dict[str, Any] = {
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["Retry-After", "X-Request-Id", "Request-Id"],
}
# as these bodies are counted
UNREAD = {TOO_LARGE: Code.RESOURCE_EXHAUSTED, TOO_LATE: Code.INVALID_ARGUMENT, ENCODED: Code.INVALID_ARGUMENT}
# As over gRPC: what a model computes an answer to. The service counts what reaches it; refusals before it are counted
# where all of them are answered.
COUNTED = frozenset(WRITING) | {embeddings_http.PATH} | relevance_http.PATHS | frozenset(tasks_http.SURFACES)


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed when the client leaves, not when memory is collected."""

    def __init__(self, events: AsyncGenerator[str, None], source: AsyncGenerator[Batch, None]) -> None:
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
    _add_middleware(app, service)
    redirect_slashes(app.router)
    started = int(time.time())
    app.state.callers, app.state.bodies = service.callers, Bodies(service.max_body_bytes)
    _add_error_handlers(app, service)
    _add_generation(app, service)  # first: routes are compared one by one
    batches = batch_routes.router(service, service.batches)
    own = [each.router(service) for each in (access, tokens_http, embeddings_http, relevance_http, tasks_http)]
    own += [messages.router(service, _respond), response_routes.router(service.responses)]
    for routes in (*own, console.router(service.console), batches, openapi.router_of(service)):
        app.include_router(routes)

    @app.get("/v1/models")
    async def list_models(caller: CallerOf) -> Response:
        models = await service.models_for(caller)
        listed: answers.ModelList = {"object": "list", "data": [model_object(model, started) for model in models]}
        return JSONResponse(listed)

    @app.get("/v1/models/{name:slashed}")
    async def get_model(name: str, caller: CallerOf) -> Response:
        models = await service.models_for(caller)
        found = [model for model in models if model.name == name]
        if not found:
            raise not_found("model", name, [model.name for model in models])
        return JSONResponse(model_object(found[0], started))

    @app.get("/v1/methods")
    async def list_methods(_: CallerOf) -> Response:
        methods = [
            {
                "name": method.name,
                "summary": method.summary,
                "lossless": method.lossless,
                "params": method.params_schema,
            }
            for method in await service.methods()
        ]
        chosen = request_parts()
        parts = await service.parts(frozenset(slots_in(chosen)))
        listed: answers.MethodList = {"object": "list", "data": methods, "request": {**chosen, "x-parts": parts}}
        return JSONResponse(listed)

    _add_health(app, service)
    _add_inside(app, service)
    return app


def _add_generation(app: FastAPI, service: GenerationService) -> None:
    @app.post(COMPLETIONS)
    @app.post(CHAT)
    @app.post(RESPONSES)
    async def generate(request: Request, caller: CallerOf) -> Response:
        return await _respond(service, request, caller, WRITING[request.scope["route"].path](service))


def _add_middleware(app: FastAPI, service: GenerationService) -> None:
    app.add_middleware(HeadAsGet)
    if origins := service.cors_origins:
        app.add_middleware(CORSMiddleware, **CORS, allow_origins=origins)


def _add_health(app: FastAPI, service: GenerationService) -> None:
    """Whether the server works, and which version it is: to anybody."""

    @app.get("/health")  # where other servers have it, and clients look for it
    @app.get("/healthz")
    async def health() -> Response:
        return _health(await service.health_report())

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        return PlainTextResponse(status_code=503 if await service.health() == "unavailable" else 200)

    @app.get("/version")
    async def version() -> Response:
        body: extras.Version = {"version": turnout.__version__}
        return JSONResponse(body)


def _health(report: HealthReport) -> JSONResponse:
    body: answers.Health = {"status": report.status}
    if report.store:
        body["store"] = report.store
    if report.endpoints:
        body["endpoints"] = report.endpoints
    return JSONResponse(body, 503 if report.status == "unavailable" else 200)


def _add_inside(app: FastAPI, service: GenerationService) -> None:
    """What the server says of itself: to everybody behind the edge, which keeps these inside, and to operators."""

    @app.get("/status")
    async def status() -> Response:
        return JSONResponse(await _status(service))

    @app.get("/load")
    async def load() -> Response:
        found = [each for each in (await service.stats()).values() if not isinstance(each, TurnoutError)]
        body: extras.Load = {"server_load": sum(each.requests + each.batch_requests for pool in found for each in pool)}
        return JSONResponse(body)

    @app.get("/v1/status")  # the console asks here: the edge lets it through
    async def status_for_operators(_: OperatorOf) -> Response:
        return JSONResponse(await _status(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.exposition.text(), media_type=CONTENT_TYPE_LATEST)


async def _status(service: GenerationService) -> answers.StatusAnswer:
    """By pool, what its replicas hold; under `errors`, why a pool does not answer."""
    pools: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, stats in (await service.stats()).items():
        if isinstance(stats, TurnoutError):
            errors[name] = stats.message
        else:
            pools[name] = finite([asdict(_without_texts(each)) for each in stats])
    return {"pools": pools, "errors": errors}


def _without_texts(stats: PoolStats) -> PoolStats:
    """What anybody may read: nothing of what a tenant was answered."""
    return stats if stats.audit is None else replace(stats, audit=replace(stats.audit, last=()))


def finite(value: Any) -> Any:
    """The same value for JSON, which has no number that is infinite or none: null instead."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def _respond(service: GenerationService, request: Request, caller: Caller, surface: Surface) -> Response:
    # Behind Serve's proxy there always is one, the caller's or the proxy's, and the proxy returns it.
    given = request.headers.get(REQUEST_ID_HEADER, "")
    call_id = request.state.call_id = surface.prefix + checked_id(given, REQUEST_ID_HEADER)
    await service.precheck(caller)
    with service.admission.reading(caller):
        data = await request.app.state.bodies.read(request, caller.tenant)
    with guarded(call_id):
        job = (await surface.job(data, caller)).traced(request.headers.get("traceparent", ""))
        if job.request_id:
            call_id = request.state.call_id = surface.prefix + job.request_id
        job = job.named(call_id)
        job = replace(job, calls=tuple(map(caller.attributed, job.calls)))
        model = service.model_name(job.calls[0].model, caller.limits)
        request.state.counted = True  # what is refused from now on, the service counts
        try:
            return await _run(service, job, surface, Head(call_id, int(time.time()), model))
        except TurnoutError as error:
            raise respell(error, job.spelling) from None


async def _run(service: GenerationService, job: Job, surface: Surface, head: Head) -> Response:
    await check_readable(service, job)
    if job.stream:
        batches = answering.stream(service, job)
        # Refusals come before the first batch: wait for it, so that they get their own status code.
        first = await anext(batches)
        return EventStream(surface.events(head, job, first, batches), batches)
    chunks, usage = await answering.answer(service, job)
    whole = JSONResponse(await surface.whole(head, job, chunks, usage))
    check_answer_bytes(len(whole.body))
    return whole


def _headers(error: TurnoutError) -> dict[str, str] | None:
    if error.code is Code.UNAUTHENTICATED:
        return {"WWW-Authenticate": "Bearer"}
    if error.retry_after_s is None and error.code is not Code.RESOURCE_EXHAUSTED:
        return None
    return {"Retry-After": str(math.ceil(error.retry_after_s or RETRY_AFTER_S))}


def _refused_early(service: GenerationService, request: Request, error: TurnoutError) -> None:
    """Count and log a refusal, with as much of the request as is known."""
    tenant, call_id = (getattr(request.state, name, other) for name, other in (("tenant", OTHER), ("call_id", "")))
    service.tracer.refused(error, tenant, call_id, service.callers.key_of(credentials(request.headers)))


def _add_error_handlers(app: FastAPI, service: GenerationService) -> None:
    @app.exception_handler(TurnoutError)
    async def refused(request: Request, error: TurnoutError) -> Response:
        if request.url.path in COUNTED and not getattr(request.state, "counted", False):
            _refused_early(service, request, error)
        return _refusal(request, error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _refusal(request, invalid(".".join(map(str, first["loc"][1:])), first["msg"]))

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        if request.url.path in COUNTED and error.status_code in UNREAD:
            _refused_early(service, request, TurnoutError(UNREAD[error.status_code], error.detail, "body"))
        message = f"{request.method} {request.url.path}: {error.detail}"
        body: answers.ErrorAnswer = {
            "error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        }
        theirs = messages.error_for(request, error.status_code, message)
        return JSONResponse(theirs or body, status_code=error.status_code, headers=error.headers)


def _refusal(request: Request, error: TurnoutError) -> Response:
    status = HTTP_STATUS[error.code]
    theirs = messages.refusal_for(request, status, error)
    return JSONResponse(theirs or error_body(error), status_code=status, headers=_headers(error))
