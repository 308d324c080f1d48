"""/v1/embeddings in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from deployments.access.callers import CallerOf
from deployments.openapi.extras import Answer
from deployments.read_surface import Asked, ReadAnswer, ReadSurface, TokensRead, usage_of
from deployments.reading import MAX_INPUTS
from deployments.request_fields import BodyPart, parse_prompts
from deployments.service import GenerationService
from turnout.embed_calls import EmbedCall, Embeddings, Pooling

PATH = "/v1/embeddings"
MOST_FLOATS = 3 << 19  # numbers that an answer has room for as JSON, some 20 bytes each
MANY = 1 << 16  # numbers that are written in a thread
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


class EmbeddingsAnswer(Answer):
    """Embeddings in the order of the input."""

    id: str
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: TokensRead


async def embedded(service: GenerationService, body: EmbeddingsBody, asked: Asked) -> ReadAnswer:
    """Ask for the embeddings that a body wants."""
    texts = tuple(parse_prompts(body.input, "input", MAX_INPUTS))
    call = EmbedCall(asked.id, asked.model, texts, body.pooling, body.dimensions, body.truncate_prompt_tokens)
    if body.encoding_format == "float":
        call = replace(call, most_numbers=MOST_FLOATS)
    with asked.asking():
        made = await service.embed(asked.attributed(call))
        many = len(made.data) > 4 * MANY
        listed = await asyncio.to_thread(_answer, made, asked, body) if many else _answer(made, asked, body)
    return ReadAnswer(listed, sum(made.prompt_tokens), many)


EMBEDDINGS = ReadSurface("embd-", EmbeddingsBody, embedded)


def router(service: GenerationService) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(PATH)
    async def embeddings(request: Request, caller: CallerOf) -> Response:
        return await EMBEDDINGS.respond(service, request, caller)

    return routes


def _answer(made: Embeddings, asked: Asked, body: EmbeddingsBody) -> EmbeddingsAnswer:
    written = _floats if body.encoding_format == "float" else _base64
    data: list[EmbeddingObject] = [
        {"object": "embedding", "index": index, "embedding": written(vector)}
        for index, vector in enumerate(made.vectors)
    ]
    usage = usage_of(sum(made.prompt_tokens))
    return {"id": asked.id, "object": "list", "data": data, "model": asked.model, "usage": usage}


def _floats(vector: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode("ascii")
