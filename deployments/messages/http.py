"""The Messages API over HTTP: its surface, its count of tokens, and its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deployments.access.callers import Caller, CallerOf
from deployments.backend import Batch
from deployments.bodies import parsed
from deployments.messages.answers import MessageError, MessageObject, TokenCount
from deployments.messages.parser import count_call, messages_job, shows_thinking
from deployments.messages.writer import MessageEvents, Options, error_body, message_object, message_of
from deployments.schemas import Job, read_json
from deployments.service import GenerationService
from deployments.surface import Head, Surface
from deployments.tokens_http import read_body, read_tokens
from turnout.calls import Chunk, Usage
from turnout.errors import TurnoutError

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"
BATCHES_PATH = f"{PATH}/batches"
REQUEST_ID_HEADER = "request-id"
Respond = Callable[[GenerationService, Request, Caller, Surface], Awaitable[Response]]


class MessagesSurface:
    """/v1/messages, see `deployments.surface.Surface`."""

    prefix = "msg_"

    def __init__(self) -> None:
        self._shows_thinking = True

    async def job(self, data: bytes, caller: Caller) -> Job:
        """See `Surface`."""
        return await parsed(data, self._read)

    def _read(self, data: bytes) -> Job:
        values = read_json(data)
        job = messages_job(values)
        self._shows_thinking = shows_thinking(values)
        return job

    async def whole(self, head: Head, job: Job, chunks: Sequence[Chunk], usage: Usage) -> MessageObject:
        """See `Surface`."""
        return message_object(head, self._options(job), chunks[0], usage)

    def events(
        self, head: Head, job: Job, first: Batch, batches: AsyncGenerator[Batch, None]
    ) -> AsyncGenerator[str, None]:
        """See `Surface`."""
        return MessageEvents(head, self._options(job)).write(job, first, batches)

    def _options(self, job: Job) -> Options:
        return Options.of(job.calls[0], self._shows_thinking)


def router(service: GenerationService, respond: Respond) -> APIRouter:
    """The two routes; `respond` answers by a surface."""
    routes = APIRouter()

    @routes.post(PATH)
    async def message(request: Request, caller: CallerOf) -> Response:
        answer = await respond(service, request, caller, MessagesSurface())
        answer.headers[REQUEST_ID_HEADER] = request.state.call_id
        return answer

    @routes.post(COUNT_PATH)
    async def count_tokens(request: Request, caller: CallerOf) -> Response:
        call = await read_body(service, request, caller, lambda data: count_call(read_json(data)))
        _, ids, _ = await read_tokens(service, caller, call)
        made: TokenCount = {"input_tokens": len(ids)}
        return JSONResponse(made)

    return routes


def refusal_for(request: Request, status: int, error: TurnoutError) -> MessageError | None:
    """As `error_for`, of an error of ours."""
    return error_for(request, status, message_of(error))


def error_for(request: Request, status: int, message: str) -> MessageError | None:
    """Return an error's body, where the request is one of this API."""
    path = request.url.path
    if path not in (PATH, COUNT_PATH, BATCHES_PATH) and not path.startswith(f"{BATCHES_PATH}/"):
        return None
    return error_body(status, message, getattr(request.state, "call_id", ""))
