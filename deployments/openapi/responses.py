"""Types of answers and events of `/v1/responses`, as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from deployments.openapi.answers import (
    ChatLogprob,
    ChoiceDetails,
    ReadDetails,
    UsageDetails,
    WrittenDetails,
)
from deployments.openapi.extras import Answer

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Answer):
    """What is said; `logprobs` are there where they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class ReasoningText(Answer):
    """What was thought."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    """What the model says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(Answer):
    """What the model thought; no summary is made of it, and nothing of it is hidden."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None


class FunctionCallItem(Answer):
    """A call that the model asks for; `arguments` is a JSON object, as text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[MessageItem | ReasoningItem | FunctionCallItem, Field(discriminator="type")]


class CacheDetails(ReadDetails):
    """Of the tokens read; those written to a cache are not counted."""

    cache_write_tokens: int


class ResponseUsage(Answer):
    """What a response used."""

    input_tokens: int
    input_tokens_details: CacheDetails
    output_tokens: int
    output_tokens_details: WrittenDetails
    total_tokens: int
    turnout: UsageDetails


class ResponseFault(Answer):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Answer):
    """A response; what the request said is repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    store: bool
    background: bool
    metadata: dict[str, str]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    user: str | None
    turnout: NotRequired[ChoiceDetails]


class InputItemList(Answer):
    """Items of a response's request."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Answer):
    """The response is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class _Event(Answer):
    sequence_number: int


class ResponseEvent(_Event):
    """The response as it is now; the last event has all of it."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class ItemEvent(_Event):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _InItem(_Event):
    item_id: str
    output_index: int


class PartEvent(_InItem):
    """A part of an item's content begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDelta(_InItem):
    """New text of a message."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ChatLogprob]


class TextDone(_InItem):
    """All text of a message."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ChatLogprob]


class ReasoningDelta(_InItem):
    """New thoughts."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(_InItem):
    """All thoughts of an item."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(_InItem):
    """New arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_InItem):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


AnyEvent = Annotated[
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone,
    Field(discriminator="type"),
]
