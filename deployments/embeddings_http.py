"""/v1/embeddings in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from deployments.access.callers import Caller, CallerOf
from deployments.faults import guarded
from deployments.openapi.extras import Answer
from deployments.reading import MAX_INPUTS
from deployments.request_fields import REQUEST_ID_HEADER, BodyPart, parse_prompts, request_id
from deployments.schemas import read_json
from deployments.service import GenerationService
from deployments.tokens_http import read_body
from turnout.embed_calls import EmbedCall, Embeddings, Pooling
from turnout.message_size import check_answer_bytes
from turnout.registry import validated

PATH = "/v1/embeddings"
MOST_FLOATS = 3 << 19  # numbers that an answer has room for as JSON, some 20 bytes each
MANY = 1 << 16  # numbers that are written in a thread
B = TypeVar("B", bound=BaseModel)
Truncate = Annotated[
    int | None, Field(description="that many first tokens of a longer text are read; -1: as many as the model can")
]


def _input_schema(schema: dict[str, Any]) -> None:
    text, ids = {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}
    several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1, "maxItems": MAX_INPUTS}
    schema["anyOf"] = [text, ids, several]


class EmbeddingsBody(BodyPart):
    """POST /v1/embeddings."""

    model: str = ""
    input: Annotated[
        Any, Field(description="a text, texts, token ids, or lists of token ids", json_schema_extra=_input_schema)
    ] = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[
        int | None, Field(ge=1, description="that many first numbers are kept, and normalised again")
    ] = None
    pooling: Annotated[
        Pooling | None, Field(description="mean of all tokens' hidden states, or the last one's; absent: the pool's")
    ] = None
    truncate_prompt_tokens: Truncate = None


class EmbeddingObject(Answer):
    """One unit vector; in base64, its float32 numbers, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class TokensRead(Answer):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Answer):
    """Embeddings in the order of the input."""

    id: str
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: TokensRead


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that only reads: who asks, under which id, which model."""

    caller: Caller
    id: str
    model: str
    request: Request

    @contextmanager
    def served(self) -> Iterator[None]:
        """Hand it to the service, which counts refusals from here on; faults of ours become errors."""
        self.request.state.counted = True
        with guarded(self.id):
            yield


async def body_of(
    service: GenerationService, request: Request, caller: Caller, kind: type[B], prefix: str
) -> tuple[B, Asked]:
    """The body of a request, and the request under an id that begins with `prefix`.

    Raises:
        TurnoutError: see `GenerationService.precheck`; INVALID_ARGUMENT or NOT_FOUND: the body, or its model.
    """
    given = request.headers.get(REQUEST_ID_HEADER, "")
    call_id = request.state.call_id = prefix + request_id(given, REQUEST_ID_HEADER)
    body = await read_body(service, request, caller, lambda data: validated(kind, read_json(data), ""))
    model = service.model_name(body.model, caller.limits)  # type: ignore[attr-defined]  # each of them has one
    return body, Asked(caller, call_id, model, request)


def usage_of(tokens: int) -> TokensRead:
    """Usage of a request that read this number of tokens."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def router(service: GenerationService) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(PATH)
    async def embeddings(request: Request, caller: CallerOf) -> Response:
        body, asked = await body_of(service, request, caller, EmbeddingsBody, "embd-")
        texts = tuple(parse_prompts(body.input, "input", MAX_INPUTS))
        call = EmbedCall(asked.id, asked.model, texts, body.pooling, body.dimensions, body.truncate_prompt_tokens)
        if body.encoding_format == "float":
            call = replace(call, most_numbers=MOST_FLOATS)
        with asked.served():
            made = await service.embed(caller.attributed(call))
            many = len(made.data) > 4 * MANY
            answer = await asyncio.to_thread(_answer, made, asked, body) if many else _answer(made, asked, body)
        check_answer_bytes(len(answer.body))
        return answer

    return routes


def _answer(made: Embeddings, asked: Asked, body: EmbeddingsBody) -> Response:
    written = _floats if body.encoding_format == "float" else _base64
    data: list[EmbeddingObject] = [
        {"object": "embedding", "index": index, "embedding": written(vector)}
        for index, vector in enumerate(made.vectors)
    ]
    usage = usage_of(sum(made.prompt_tokens))
    listed: EmbeddingsAnswer = {"id": asked.id, "object": "list", "data": data, "model": asked.model, "usage": usage}
    return JSONResponse(listed)


def _floats(vector: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode("ascii")
