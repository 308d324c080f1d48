"""Translation of a request of /v1/responses into a chat body, which the chat endpoint's parser reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.faults import respell
from deployments.responses.body import AllowedChoice, Given, NamedChoice, ResponseBody
from deployments.responses.items import Conversation, Item, read_item, resolved
from deployments.responses.store import KeptResponse
from deployments.schemas import Job, chat_job, without_ignored
from turnout.errors import TurnoutError, invalid

SPELLING = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of /v1/responses.

    Attributes:
        body: its own fields.
        items: of its input, references resolved.
        history: ids of the responses it follows, the oldest first.
        job: what it asks the service for.
    """

    body: ResponseBody
    items: tuple[Item, ...]
    history: tuple[str, ...]
    job: Job


def translate(given: Given, before: Sequence[KeptResponse], kept: Mapping[str, dict[str, Any]]) -> Asked:
    """Translate a request.

    Args:
        given: the body.
        before: the responses that it follows, the oldest first.
        kept: items that it may refer to, by id.

    Raises:
        TurnoutError: INVALID_ARGUMENT or NOT_FOUND, naming the field and what is allowed.
    """
    body, talk = given.body, Conversation()
    talk.instruct(body.instructions)
    for each in before:
        for item in each.items:
            talk.add(read_item(item, "previous_response_id"), "previous_response_id")
    own = [resolved(read_item(each, f"input.{n}"), kept, f"input.{n}") for n, each in enumerate(given.items)]
    for place, read in enumerate(own):
        talk.add(read, f"input.{place}")
    names = SPELLING | talk.spelling | {f"tools.{n}.function": f"tools.{n}" for n in range(len(body.tools))}
    try:
        job = chat_job(without_ignored(_chat_body(given, talk)))
    except TurnoutError as error:
        raise respell(error, names) from None
    spelling = names | {ours: _respelled(theirs, names) for ours, theirs in job.spelling.items()}
    return Asked(body, tuple(own), tuple(each.id for each in before), replace(job, spelling=spelling))


def _chat_body(given: Given, talk: Conversation) -> dict[str, Any]:
    body = given.body
    values = {
        **given.more,
        "model": body.model,
        "messages": talk.messages,
        "stream": body.stream,
        "max_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort,
        "response_format": _response_format(body),
        **_tools(body),
    }
    if body.logprobs is not None:
        values |= {"logprobs": True, "top_logprobs": body.logprobs}
    return values


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    form = body.text.format
    if form.type != "json_schema":
        return None if form.type == "text" else {"type": form.type}
    if form.schema_ is None:
        raise invalid("text.format.schema", "is needed")
    return {"type": form.type, "json_schema": form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


def _tools(body: ResponseBody) -> dict[str, Any]:
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedChoice):
        choice = choice.model_dump()  # the chat endpoint takes this form, too
    elif isinstance(choice, NamedChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    if not body.tools:
        return {"tool_choice": None if choice == "auto" else choice}
    functions = [each.model_dump(include={"name", "description", "parameters", "strict"}) for each in body.tools]
    return {"tools": [{"type": "function", "function": each} for each in functions], "tool_choice": choice}


def _respelled(field: str, names: Mapping[str, str]) -> str:
    return respell(invalid(field, ""), names).field or field
