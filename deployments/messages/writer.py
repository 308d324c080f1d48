"""Answers in the shape of the Messages API: messages, the events of a stream, errors."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar, cast

from deployments.backend import Batch
from deployments.faults import guarded, respell
from deployments.messages.answers import (
    BlockDelta,
    BlockPart,
    ContentBlock,
    FaultType,
    MessageDelta,
    MessageEnd,
    MessageError,
    MessageEvent,
    MessageObject,
    MessageUsage,
    StopReason,
)
from deployments.openai_format import HTTP_STATUS, token_object, usage_object
from deployments.schemas import Job
from deployments.surface import Head
from deployments.tools import CallReader, functions_of
from turnout.calls import Begun, Chunk, GenerateCall, TokenOut, Usage
from turnout.errors import Code, TurnoutError
from turnout.json_lines import json_line
from turnout.tools import ToolCallPart
from turnout.types import FinishReason

E = TypeVar("E", BlockDelta, MessageDelta)
FAULTS: dict[int, FaultType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, request_id: str | None) -> MessageError:
    """Return the API's error object.

    Args:
        status: of HTTP.
        message: for the caller.
        request_id: "" and None: there is none yet.
    """
    kind = FAULTS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}


def message_of(error: TurnoutError) -> str:
    """Return an error's message; agents look for Anthropic's words to find out that the context is full."""
    too_long = error.code is Code.OUT_OF_RANGE and error.field == "messages"
    return f"prompt is too long: {error.message}" if too_long else error.message


@dataclass(frozen=True, slots=True)
class Options:
    """What a request says of the form of its answer.

    Attributes:
        functions: JSON schemas of arguments by function that may be called; None: none may.
        shows_thinking: whether the text of thinking is written.
        shows_tokens: whether each token is reported.
        max_tokens: most tokens that were asked for.
    """

    functions: Mapping[str, Any] | None
    shows_thinking: bool
    shows_tokens: bool
    max_tokens: int

    @classmethod
    def of(cls, call: GenerateCall, shows_thinking: bool) -> Options:
        """Those of a call."""
        return cls(functions_of(call), shows_thinking, call.sampling.token_details, call.sampling.max_tokens)


def message_object(head: Head, options: Options, chunk: Chunk, usage: Usage) -> MessageObject:
    """Write a whole answer."""
    read = chunk if options.functions is None else CallReader(options.functions).whole(chunk)
    content: list[ContentBlock] = []
    if read.reasoning:
        shown = read.reasoning if options.shows_thinking else ""
        content.append({"type": "thinking", "thinking": shown, "signature": signature(read.reasoning)})
    if read.text:
        content.append({"type": "text", "text": read.text})
    for call in read.tool_calls:
        given: dict[str, Any] = json.loads(call.arguments)
        content.append({"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": given})
    end = _end(read, usage, options)
    made: MessageObject = {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": end["stop_reason"],
        "stop_sequence": end["stop_sequence"],
        "usage": message_usage(usage),
    }
    if options.shows_tokens:
        made["turnout"] = {"tokens": [token_object(token) for token in read.tokens]}
    return made


def message_usage(usage: Usage) -> MessageUsage:
    """What a message used. What is cached is not counted: prefixes are, without being marked."""
    whole = usage_object(usage)
    details = cast("dict[str, int]", whole["completion_tokens_details"])
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": details.get("reasoning_tokens", 0)},
        "turnout": whole["turnout"],
    }


def tool_use_id(call_id: str) -> str:
    """Return the id of a call as clients of this API know them."""
    return f"toolu_{call_id.removeprefix('call_')}"


def signature(thinking: str) -> str:
    """Return what stands for the signature of thinking: a digest, for clients that leave out what has none."""
    return b64encode(blake2b(thinking.encode(), digest_size=24).digest()).decode()


def _end(last: Chunk, usage: Usage, options: Options) -> MessageEnd:
    """Why a message ended; `last` is its last chunk."""
    reason: StopReason = "end_turn"
    stop = last.stop if isinstance(last.stop, str) else None
    if last.tool_calls and last.finish_reason is not FinishReason.LENGTH:  # a later call may be cut
        reason, stop = "tool_use", None
    elif stop is not None:
        reason = "stop_sequence"
    elif last.finish_reason is FinishReason.LENGTH:
        # A router may have set a lower limit; without one, only the context ends an answer before the limit.
        short = usage.completion_tokens < options.max_tokens and usage.route is None
        reason = "model_context_window_exceeded" if short else "max_tokens"
    return {"stop_reason": reason, "stop_sequence": stop}


class MessageEvents:
    """Writer of one answer's events.

    Args:
        head: of the answer.
        options: of its form.
    """

    def __init__(self, head: Head, options: Options) -> None:
        self._head = head
        self._options = options
        self._reader = None if options.functions is None else CallReader(options.functions)
        self._began = False
        self._open = ""
        self._index = -1
        self._call = -1
        self._thinking: list[str] = []
        self._tokens: list[TokenOut] = []
        self._last: Chunk | None = None

    async def write(self, job: Job, first: Batch, batches: AsyncGenerator[Batch, None]) -> AsyncGenerator[str, None]:
        """Write all events, errors included; see `Surface.events`."""
        try:
            with guarded(self._head.id):
                for event in self.of_batch(first):
                    yield _sse(event)
                async for batch in batches:
                    for event in self.of_batch(batch):
                        yield _sse(event)
        except TurnoutError as error:
            said = respell(error, job.spelling)
            yield _sse(error_body(HTTP_STATUS[said.code], message_of(said), self._head.id))

    def of_batch(self, batch: Batch) -> Iterator[MessageEvent]:
        """Write the next batch of events of the pool."""
        if not self._began:
            self._began = True
            yield from self._start(next((each.prompt_tokens for each in batch if isinstance(each, Begun)), 0))
        for each in batch:
            if isinstance(each, Chunk):
                yield from self._part(self._reader.part(each) if self._reader is not None else each)
            elif isinstance(each, Usage):
                yield from self._finish(each)

    def _start(self, prompt_tokens: int) -> Iterator[MessageEvent]:
        usage: MessageUsage = {
            "input_tokens": prompt_tokens,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        message: MessageObject = {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _part(self, chunk: Chunk) -> Iterator[MessageEvent]:
        if self._options.shows_tokens:
            self._tokens += chunk.tokens
        if chunk.reasoning:
            if self._open != "thinking":
                yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(chunk.reasoning)
            if self._options.shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": chunk.reasoning})
        if chunk.text:
            if self._open != "text":
                yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": chunk.text})
        for part in chunk.call_parts:
            yield from self._call_part(part)
        if chunk.finish_reason is not None:
            self._last = chunk

    def _call_part(self, part: ToolCallPart) -> Iterator[MessageEvent]:
        if self._open != "tool_use" or part.index != self._call:
            self._call = part.index
            block: ContentBlock = {"type": "tool_use", "id": tool_use_id(part.id), "name": part.name, "input": {}}
            yield from self._begin("tool_use", block)
        if part.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def _begin(self, kind: str, block: ContentBlock) -> Iterator[MessageEvent]:
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[MessageEvent]:
        if self._open == "thinking":
            signed, self._thinking = signature("".join(self._thinking)), []
            yield self._delta({"type": "signature_delta", "signature": signed})
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""

    def _delta(self, delta: BlockPart) -> BlockDelta:
        made: BlockDelta = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return self._with_tokens(made)

    def _with_tokens(self, made: E) -> E:
        """Add the tokens that no event has reported."""
        if self._tokens:
            made["turnout"] = {"tokens": [token_object(token) for token in self._tokens]}
            self._tokens = []
        return made

    def _finish(self, usage: Usage) -> Iterator[MessageEvent]:
        yield from self._close()
        last = self._last or Chunk(0, "", (), FinishReason.STOP)
        end: MessageDelta = {
            "type": "message_delta",
            "delta": _end(last, usage, self._options),
            "usage": message_usage(usage),
        }
        yield self._with_tokens(end)
        yield {"type": "message_stop"}


def _sse(event: MessageEvent) -> str:
    return f"event: {event['type']}\ndata: {json_line(event)}\n\n"
