"""Types of streamed answers: events whose `data` is a chunk, an error or `[DONE]`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from deployments.openapi.answers import (
    ChatLogprobs,
    ChoiceDetails,
    Logprobs,
    UsageObject,
)
from deployments.openapi.extras import Answer, ChoiceExtras, PromptExtras, TokenCounts
from turnout.types import FinishReason

DONE = "[DONE]"


class CompletionPart(ChoiceExtras, PromptExtras):
    """New output of one answer."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    turnout: NotRequired[ChoiceDetails]


class CompletionChunk(Answer):
    """Part of the answer of /v1/completions; the last one has `usage` where it was asked for, and no choices.

    With `continuous_usage_stats` all have it, those before the last one the counts so far.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionPart]
    usage: NotRequired[UsageObject | TokenCounts | None]


class CalledPart(Answer):
    """What the model asks for: the name comes with the first part, the arguments of all parts are joined."""

    name: NotRequired[str]
    arguments: str


class ToolCallPart(Answer):
    """New output of the call with number `index`; `id` and `type` come with its first part."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledPart


class MessagePart(Answer):
    """What the model says; the first part of an answer names the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPart]]


class ChatPart(ChoiceExtras):
    """New output of one answer."""

    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    turnout: NotRequired[ChoiceDetails]


class ChatChunk(PromptExtras):
    """Part of the answer of /v1/chat/completions; the last one has `usage` where it was asked for, and no choices.

    With `continuous_usage_stats` all have it, those before the last one the counts so far.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatPart]
    usage: NotRequired[UsageObject | TokenCounts | None]


def event_schema(chunk: dict[str, Any], fault: dict[str, Any]) -> dict[str, Any]:
    """Describe one event of a stream in OpenAPI 3.1: its `data` is a string that holds JSON, or `[DONE]`.

    Args:
        chunk: reference to the shape of a part of the answer.
        fault: reference to the shape of what ends a stream that failed.
    """
    held = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, fault]}}
    return {
        "type": "object",
        "description": f"an event; the last one has the data `{DONE}`, or holds the error",
        "properties": {"data": {"anyOf": [{"const": DONE}, held]}},
        "required": ["data"],
    }


def named_event_schema(data: dict[str, Any]) -> dict[str, Any]:
    """Describe one event of a stream whose events have names: `event` is the `type` of what `data` holds, as JSON.

    Args:
        data: shapes of what is held, discriminated by `type`.
    """
    held = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "description": "an event, named by the type of its data",
        "properties": {"event": {"enum": sorted(data["discriminator"]["mapping"])}, "data": held},
        "required": ["event", "data"],
    }
