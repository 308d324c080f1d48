"""/tokenize and /detokenize: what a model would read, in vLLM's shapes. Nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from deployments.access.callers import Caller, CallerOf
from deployments.bodies import parsed
from deployments.openapi.extras import Answer
from deployments.request_fields import BodyPart, request_id
from deployments.schemas import ChatTurn, chat_message, read_json
from deployments.service import GenerationService
from deployments.tools import ToolBody, offered
from turnout.calls import GenerateCall
from turnout.chat_template import TemplateOptions
from turnout.errors import invalid
from turnout.registry import validated
from turnout.types import SamplingParams

T = TypeVar("T")


class TokenizeBody(BodyPart):
    """POST /tokenize: a prompt, or a conversation with its tools."""

    model: str = ""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[ChatTurn], Field(min_length=1)] | None = None
    tools: list[ToolBody] = Field(default_factory=list)
    add_special_tokens: Annotated[
        bool, Field(description="of a prompt, as in completions; in a conversation the template alone says")
    ] = True
    return_token_strs: Annotated[Literal[False] | None, Field(description="true is not supported")] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class DetokenizeBody(BodyPart):
    """POST /detokenize."""

    model: str = ""
    tokens: Annotated[list[int], Field(min_length=1, max_length=1_000_000)]


class Tokens(Answer):
    """What a model would read."""

    count: int
    max_model_len: int
    tokens: list[int]


class TokensText(Answer):
    """The text of tokens."""

    prompt: str


def router(service: GenerationService) -> APIRouter:
    """The two routes."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request, caller: CallerOf) -> Response:
        values = await read_body(service, request, caller, read_json)
        call, ids, _ = await read_tokens(service, caller, tokenized(validated(TokenizeBody, values, "")))
        longest = next(each.max_length for each in await service.models_for(caller) if each.name == call.model)
        made: Tokens = {"count": len(ids), "max_model_len": longest, "tokens": list(ids)}
        return JSONResponse(made)

    @routes.post("/detokenize")
    async def detokenize(request: Request, caller: CallerOf) -> Response:
        body = await read_body(service, request, caller, lambda data: validated(DetokenizeBody, read_json(data), ""))
        _, _, text = await read_tokens(service, caller, _call(body.model, prompt=tuple(body.tokens)))
        made: TokensText = {"prompt": text}
        return JSONResponse(made)

    return routes


def tokenized(body: TokenizeBody) -> GenerateCall:
    """The call that would read what a body holds.

    Raises:
        TurnoutError: INVALID_ARGUMENT: neither or both of prompt and messages, or a message or tool is at fault.
    """
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either a prompt or messages")
    if body.messages is None:
        return _call(body.model, prompt=body.prompt, add_special_tokens=body.add_special_tokens)
    turns = tuple(chat_message(turn, f"messages.{place}") for place, turn in enumerate(body.messages))
    template = TemplateOptions(
        body.chat_template_kwargs, body.reasoning_effort, body.add_generation_prompt, body.continue_final_message
    )
    template.check([turn.role for turn in body.messages])
    return _call(body.model, messages=turns, tools=offered(body.tools, None)[0], template=template)


def _call(model: str, **what: Any) -> GenerateCall:
    return GenerateCall(request_id(), model, SamplingParams(), **what)


async def read_body(service: GenerationService, request: Request, caller: Caller, read: Callable[[bytes], T]) -> T:
    """Read the body of a request that writes nothing; `read` makes something of it, in a thread where it is large.

    Raises:
        TurnoutError: RESOURCE_EXHAUSTED, or INVALID_ARGUMENT: it is no JSON object.
    """
    await service.precheck(caller)
    with service.admission.reading(caller):
        data = await request.app.state.bodies.read(request, caller.tenant)
    return await parsed(data, read)


async def read_tokens(
    service: GenerationService, caller: Caller, call: GenerateCall
) -> tuple[GenerateCall, tuple[int, ...], str]:
    """Return the call with its model's name, and what it gives the model to read, as ids and as text."""
    call = caller.attributed(replace(call, model=service.model_name(call.model, caller.limits)))
    return (call, *await service.tokens(call))
