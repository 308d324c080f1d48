"""The shapes of streamed answers, for the document only: events whose `data` is a chunk, a fault or `[DONE]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from deployments.openapi.answers import (
    Answer,
    ChatLogprobs,
    ChoiceDetails,
    Logprobs,
    ToolCallObject,
    UsageObject,
)

DONE = "[DONE]"


class CompletionPart(Answer):
    """New output of one answer."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    turnout: ChoiceDetails = ChoiceDetails(tokens=[])


class CompletionChunk(Answer):
    """Part of the answer of /v1/completions; the last one has `usage` where it was asked for, and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionPart]
    usage: UsageObject | None = None


class ToolCallPart(ToolCallObject):
    """A call; it comes whole."""

    index: Literal[0]


class MessagePart(Answer):
    """What the model says; the first part of an answer names the role."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallPart] = Field(default_factory=list)


class ChatPart(Answer):
    """New output of one answer."""

    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    turnout: ChoiceDetails = ChoiceDetails(tokens=[])


class ChatChunk(Answer):
    """Part of the answer of /v1/chat/completions; the last one has `usage` where it was asked for, and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPart]
    usage: UsageObject | None = None


def event_schema(chunk: dict[str, Any], fault: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream, as OpenAPI 3.1 tells it: its `data` is a text that holds JSON, or says that this is all.

    Args:
        chunk: reference to the shape of a part of the answer.
        fault: reference to the shape of what ends a stream that failed.
    """
    held = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, fault]}}
    return {
        "type": "object",
        "description": f"an event; the last one has the data `{DONE}`, or tells what failed",
        "properties": {"data": {"anyOf": [{"const": DONE}, held]}},
        "required": ["data"],
    }
