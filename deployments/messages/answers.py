"""Types of the Messages API's answers and events, as in `deployments.openapi.answers`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from deployments.openapi.answers import ChoiceDetails, UsageDetails
from deployments.openapi.extras import Answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
FaultType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
]


class TextContent(Answer):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    """What it thought; the signature is not checked when it comes back."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Answer):
    """A call that it makes."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class OutputDetails(Answer):
    """Of the output's tokens."""

    thinking_tokens: int


class MessageUsage(Answer):
    """What a message used; `input_tokens` are those that were not cached."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputDetails]
    turnout: NotRequired[UsageDetails]


class MessageObject(Answer):
    """Answer of /v1/messages; in the first event of a stream, still without content."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    turnout: NotRequired[ChoiceDetails]


class TokenCount(Answer):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageFault(Answer):
    """What was refused or failed."""

    type: FaultType
    message: str


class MessageError(Answer):
    """Every refusal and failure of the Messages API, and the event that ends a stream that failed."""

    type: Literal["error"]
    error: MessageFault
    request_id: str | None


class MessageStart(Answer):
    """First event of a stream."""

    type: Literal["message_start"]
    message: MessageObject


class Ping(Answer):
    """Event without a meaning."""

    type: Literal["ping"]


class BlockStart(Answer):
    """Start of a content block, which is empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(Answer):
    """New text of a text block."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    """New text of a thinking block."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Answer):
    """Signature of a thinking block, at its end."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(Answer):
    """New output of a call; those of a block, joined, are its input as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockPart = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(Answer):
    """New output of the open content block."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockPart
    turnout: NotRequired[ChoiceDetails]


class BlockStop(Answer):
    """End of a content block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer):
    """End of a message, with what it used."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    turnout: NotRequired[ChoiceDetails]


class MessageStop(Answer):
    """Last event of a stream."""

    type: Literal["message_stop"]


MessageEvent = Annotated[
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError,
    Field(discriminator="type"),
]
