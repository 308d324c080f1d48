"""Output of a response: items made of an answer's chunks, and the events that a stream has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from deployments.openai_format import chat_token
from deployments.openapi.answers import ChatLogprob
from deployments.openapi.responses import FunctionCallItem, MessageItem, OutputItem, ReasoningItem
from deployments.responses.store import item_id
from turnout.calls import Chunk, TokenOut
from turnout.tools import ToolCall, ToolCallPart
from turnout.types import FinishReason

Event = dict[str, Any]  # as in deployments.openapi.responses, still without its number
Ending = Literal["completed", "incomplete"]


class Output:
    """Items of one answer. A whole answer is a stream of one chunk, so that both give the same items.

    Chunks have their calls read out already, see `deployments.tools.CallReader`.

    Args:
        response_id: of the response.
        logprobs: whether log-probabilities are reported.

    Attributes:
        items: those that are whole, and the last one as it is now.
        tokens: of all chunks.
        ending: how the answer ended; incomplete as long as it has not.
    """

    def __init__(self, response_id: str, logprobs: bool) -> None:
        self.items: list[OutputItem] = []
        self.tokens: list[TokenOut] = []
        self.ending: Ending = "incomplete"
        self._response_id = response_id
        self._logprobs = logprobs
        self._open: Literal["reasoning", "message", "function_call"] | None = None
        self._text = ""  # of the open item
        self._said: list[TokenOut] = []  # tokens of the open message
        self._unsaid: list[TokenOut] = []  # tokens of no text yet
        self._calls = 0  # begun
        self._finish: FinishReason | None = None

    def add(self, chunk: Chunk) -> list[Event]:
        """Go on with an answer; what is new."""
        self.tokens += chunk.tokens
        self._unsaid += chunk.tokens
        events: list[Event] = []
        if chunk.reasoning:
            events += self._go_on("reasoning", chunk.reasoning)
            self._unsaid = self._unsaid if chunk.text else []
        if chunk.text:
            events += self._go_on("message", chunk.text, len(chunk.reasoning))
        parts = chunk.call_parts
        if not parts and not self._calls:
            parts = tuple(_whole_part(place, call) for place, call in enumerate(chunk.tool_calls))
        for part in parts:
            events += self._call(part)
        if chunk.finish_reason is not None:
            self._finish = chunk.finish_reason
        return events

    def end(self) -> list[Event]:
        """Close the answer; the last events of its items."""
        events: list[Event] = []
        if not self.items and self._finish is FinishReason.STOP:
            events += self._begin_message()  # an answer of no text is an answer
        self.ending = "completed" if self._finish is FinishReason.STOP else "incomplete"
        return events + self._close(self.ending)

    def _go_on(self, kind: Literal["reasoning", "message"], text: str, skipped: int = 0) -> list[Event]:
        events: list[Event] = []
        if self._open != kind:
            events += self._close("completed")
            events += self._begin_reasoning() if kind == "reasoning" else self._begin_message()
        self._text += text
        at = {**self._at(), "content_index": 0, "delta": text}
        if kind == "reasoning":
            return [*events, {"type": "response.reasoning_text.delta", **at}]
        said, self._unsaid = tokens_of(self._unsaid, text, skipped)
        self._said += said
        return [*events, {"type": "response.output_text.delta", **at, "logprobs": self._reported(said)}]

    def _begin_reasoning(self) -> list[Event]:
        item: ReasoningItem = {
            "id": self._next_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": [],
            "encrypted_content": None,
        }  # fmt: skip
        return self._begin(item, {"type": "reasoning_text", "text": ""})

    def _begin_message(self) -> list[Event]:
        item: MessageItem = {
            "id": self._next_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []
        }  # fmt: skip
        return self._begin(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _call(self, part: ToolCallPart) -> list[Event]:
        events: list[Event] = []
        if part.index >= self._calls:
            events += self._close("completed")
            self._calls = part.index + 1
            item: FunctionCallItem = {
                "id": self._next_id("fc"), "type": "function_call", "status": "in_progress", "call_id": part.id,
                "name": part.name, "arguments": "",
            }  # fmt: skip
            events += self._begin(item, None)
        self._text += part.arguments
        if part.arguments:
            events.append(
                {"type": "response.function_call_arguments.delta", **self._at(), "delta": part.arguments}
            )  # fmt: skip
        return events

    def _begin(self, item: OutputItem, part: Mapping[str, Any] | None) -> list[Event]:
        self.items.append(item)
        self._open, self._text, self._said = item["type"], "", []
        place = len(self.items) - 1
        events: list[Event] = [{"type": "response.output_item.added", "output_index": place, "item": dict(item)}]
        if part is not None:
            events.append({"type": "response.content_part.added", **self._at(), "content_index": 0, "part": part})
        return events

    def _close(self, status: Ending) -> list[Event]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        item, self._open = self.items[-1], None
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = self._text
            said = {"name": item["name"], "arguments": self._text}
            events.append({"type": "response.function_call_arguments.done", **self._at(), **said})
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": self._text}]
            events += self._part_done("response.reasoning_text.done", {"text": self._text}, item["content"][0])
        else:
            logprobs = self._reported(self._said)
            item["content"] = [
                {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}
            ]  # fmt: skip
            done = {"text": self._text, "logprobs": logprobs}
            events += self._part_done("response.output_text.done", done, item["content"][0])
        place = len(self.items) - 1
        return [*events, {"type": "response.output_item.done", "output_index": place, "item": dict(item)}]

    def _part_done(self, name: str, done: Mapping[str, Any], part: Mapping[str, Any]) -> list[Event]:
        at = {**self._at(), "content_index": 0}
        return [{"type": name, **at, **done}, {"type": "response.content_part.done", **at, "part": part}]

    def _at(self) -> Event:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _next_id(self, kind: str) -> str:
        return item_id(kind, self._response_id, len(self.items))

    def _reported(self, tokens: Sequence[TokenOut]) -> list[ChatLogprob]:
        return [chat_token(token) for token in tokens] if self._logprobs else []


def tokens_of(tokens: Sequence[TokenOut], text: str, skipped: int = 0) -> tuple[list[TokenOut], list[TokenOut]]:
    """Return the tokens of a text among those that were written since the text before it, and those after them.

    Args:
        tokens: in order; what comes before the text is thoughts and marks, what comes after it is calls, or text that
            is held back.
        text: not empty.
        skipped: length of the thoughts before it.
    """
    ends, written = [], ""
    for token in tokens:
        written += token.text
        ends.append(len(written))
    start = written.find(text, skipped)
    if start < 0:  # text that lagged behind
        return list(tokens), []
    first = next(n for n, end in enumerate(ends) if end > start)
    last = next(n for n, end in enumerate(ends) if end >= start + len(text))
    while first and not tokens[first - 1].text and tokens[first - 1].broken:  # the first bytes of a character
        first -= 1
    return list(tokens[first : last + 1]), list(tokens[last + 1 :])


def _whole_part(index: int, call: ToolCall) -> ToolCallPart:
    return ToolCallPart(index, call.id, call.name, call.arguments)
