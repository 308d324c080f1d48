"""Conversations of gRPC messages, with tools: held to the rules of HTTP's bodies, refused by their names here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from pydantic import BaseModel

from deployments.schemas import ChatTurn, chat_message
from deployments.tools import (
    AllowedTool,
    AllowedToolsChoice,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolChoice,
    choice_name,
    offered,
)
from turnout.calls import ChatMessage, ReasoningMode
from turnout.chat_template import TemplateOptions
from turnout.errors import TurnoutError, invalid
from turnout.proto import generation_pb2 as pb
from turnout.registry import validated
from turnout.structure import Structure
from turnout.tools import Tool

MODES: tuple[Literal["none", "auto", "required"], ...] = ("none", "auto", "required")


class _Chat(BaseModel):
    """What of a message stands in HTTP's bodies, too."""

    messages: list[ChatTurn]
    tools: list[ToolBody]


def template(chat: pb.Chat, kwargs: dict[str, Any]) -> TemplateOptions:
    """Return what the chat template gets; `kwargs` are the message's own, as JSON.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    made = TemplateOptions(kwargs, chat.reasoning_effort, begins, chat.continue_final_message)
    made.check([turn.role for turn in chat.messages], "chat.")
    return made


def reasoning_mode(chat: pb.Chat) -> ReasoningMode:
    """Return where the thinking goes.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    modes: tuple[ReasoningMode, ...] = get_args(ReasoningMode)
    for mode in modes:
        if mode == (chat.reasoning or "split"):
            return mode
    raise invalid("chat.reasoning", f"must be one of {', '.join(modes)}")


def conversation(
    chat: pb.Chat, answer: Structure | None = None
) -> tuple[tuple[ChatMessage, ...], tuple[Tool, ...], Structure | None]:
    """A conversation, the tools offered in it, and what the answer must fit so that calls of them can be read.

    Args:
        chat: the message.
        answer: what an answer that calls none must fit.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    with _as_in_messages():
        turns = [
            {
                "role": turn.role,
                "content": turn.content if turn.content or not turn.tool_calls else None,
                "tool_calls": [_called(call) for call in turn.tool_calls],
                "tool_call_id": turn.tool_call_id,
                **({"reasoning": turn.reasoning} if turn.reasoning else {}),
            }
            for turn in chat.messages
        ]
        tools = [_tool(tool, place) for place, tool in enumerate(chat.tools)]
        read = validated(_Chat, {"messages": turns, "tools": tools}, "")
        messages = tuple(chat_message(turn, f"messages.{place}") for place, turn in enumerate(read.messages))
        several = not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
        return messages, *offered(read.tools, _choice(chat), several, answer)


def tool_choice(chat: pb.Chat) -> str:
    """`GenerateCall.tool_choice` of a conversation."""
    return choice_name(_choice(chat))


@contextmanager
def _as_in_messages() -> Iterator[None]:
    """What HTTP's bodies have within a `function` is one of the other fields here."""
    try:
        yield
    except TurnoutError as error:
        theirs = error.field or ""
        ours = "chat." + theirs.replace(".function", "", 1)
        raise TurnoutError(error.code, ours + error.message.removeprefix(theirs), ours) from None


def _called(call: pb.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: pb.Tool, place: int) -> dict[str, Any]:
    try:
        parameters = json.loads(tool.parameters or "{}")
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict):
        raise invalid(f"tools.{place}.parameters", "must be a JSON schema that is an object, as text")
    return {"function": {"name": tool.name, "description": tool.description, "parameters": parameters}}


def _choice(chat: pb.Chat) -> ToolChoice | None:
    if chat.tool_choice.allowed:
        if chat.tool_choice.mode not in ("", "auto", "required"):
            raise invalid("tool_choice.allowed", "needs mode auto or required, or none given")
        tools = [AllowedTool(name=name) for name in chat.tool_choice.allowed]
        must: Literal["auto", "required"] = "required" if chat.tool_choice.mode == "required" else "auto"
        return AllowedToolsChoice(type="allowed_tools", mode=must, tools=tools)
    match chat.tool_choice.WhichOneof("kind"):
        case "name":
            return NamedTool(function=NamedFunction(name=chat.tool_choice.name))
        case "mode":
            mode = next((each for each in MODES if each == chat.tool_choice.mode), None)
            if mode is None:
                raise invalid("tool_choice.mode", f"must be one of {', '.join(MODES)}")
            return mode
    return None
