"""A surface whose models only read: embeddings, scores, rankings. One body, one call, one answer, no stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from deployments.access.callers import Caller
from deployments.faults import guarded
from deployments.openapi.extras import Answer
from deployments.request_fields import REQUEST_ID_HEADER, request_id
from deployments.schemas import read_json
from deployments.service import GenerationService
from deployments.tokens_http import read_body
from turnout.message_size import check_answer_bytes
from turnout.registry import validated

B = TypeVar("B", bound=BaseModel)
Attributed = Callable[[Any], Any]  # a call -> the same call as its caller's


class TokensRead(Answer):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


def usage_of(tokens: int) -> TokensRead:
    """Usage of a request that read this number of tokens."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that only reads.

    Attributes:
        id: of the request, of its answer and in every log.
        model: as it is called here.
        attributed: makes a call the caller's.
        served: called when the service is asked: it counts what is refused from then on.
    """

    id: str
    model: str
    attributed: Attributed
    served: Callable[[], None] = lambda: None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Hand it to the service; faults of ours become errors."""
        self.served()
        with guarded(self.id):
            yield


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """An answer.

    Attributes:
        body: as it is sent.
        prompt_tokens: that were read for it.
        large: whether it is written in a thread.
    """

    body: Mapping[str, Any]
    prompt_tokens: int
    large: bool = False


@dataclass(frozen=True, slots=True)
class ReadSurface(Generic[B]):
    """One endpoint.

    Attributes:
        prefix: of its answers' ids.
        body: of its requests; has a field `model`.
        answer: asks for what a body wants.
    """

    prefix: str
    body: type[B]
    answer: Callable[[GenerationService, B, Asked], Awaitable[ReadAnswer]]

    def read(self, data: bytes) -> B:
        """Parse a body.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the field and what is allowed.
        """
        return validated(self.body, read_json(data), "")

    async def respond(self, service: GenerationService, request: Request, caller: Caller) -> Response:
        """Answer a request.

        Raises:
            TurnoutError: see `GenerationService.precheck`; INVALID_ARGUMENT or NOT_FOUND: the body, or its model.
        """
        given = request.headers.get(REQUEST_ID_HEADER, "")
        call_id = request.state.call_id = self.prefix + request_id(given, REQUEST_ID_HEADER)
        body = await read_body(service, request, caller, self.read)
        model = service.model_name(body.model, caller.limits)  # type: ignore[attr-defined]  # each of them has one

        def served() -> None:
            request.state.counted = True

        found = await self.answer(service, body, Asked(call_id, model, caller.attributed, served))
        written = await asyncio.to_thread(JSONResponse, found.body) if found.large else JSONResponse(found.body)
        check_answer_bytes(len(written.body))
        return written
