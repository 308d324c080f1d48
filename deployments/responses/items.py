"""Items of a conversation: how they are read from a request, kept, and made messages of the chat endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from deployments.request_fields import BodyPart
from deployments.responses.store import INPUT_ITEMS, item_id
from turnout.errors import invalid, not_found
from turnout.registry import validated

INPUT_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
SYSTEM = ("system", "developer")


class _Item(BodyPart):
    """An item; members that other servers add, and clients send back, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = ""


class MessageItem(_Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any


class CallItem(_Item):
    """A call that the model asked for."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    arguments: str = ""


class OutputItem(_Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Any


class ThoughtItem(_Item):
    """What the model thought; without `content` it cannot be read here."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] = Field(default_factory=list)
    summary: list[dict[str, Any]] = Field(default_factory=list)


class ReferenceItem(_Item):
    """An item that is kept, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Annotated[str, Field(min_length=1)]


Item = MessageItem | CallItem | OutputItem | ThoughtItem | ReferenceItem
KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ThoughtItem,
    "item_reference": ReferenceItem,
}
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def read_item(values: Mapping[str, Any], field: str) -> Item:
    """Parse an item of a request, or one that was kept.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming what is wrong below `field`.
    """
    kind = values.get("type") or ("message" if "role" in values else "item_reference")
    if not isinstance(kind, str) or kind not in KINDS:
        raise invalid(f"{field}.type", f"must be one of {', '.join(KINDS)} (got {str(kind)[:60]!r})")
    return validated(KINDS[kind], values, field)


def text_of(content: Any, field: str) -> str:
    """Return a content, a text or parts of one, as text.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it, or a part, is no text; names it.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(field, "must be a text, or text parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(INPUT_TEXTS.get(kind, "")) if isinstance(kind, str) else None
        if not isinstance(text, str):
            message = f"must be a text part: {', '.join(INPUT_TEXTS)} (got {str(kind)[:60]!r})"
            raise invalid(f"{field}.{place}", message)
        texts.append(text)
    return "".join(texts)


def resolved(item: Item, kept: Mapping[str, dict[str, Any]], field: str) -> Item:
    """Return the item that a reference stands for; another item is itself.

    Raises:
        TurnoutError: NOT_FOUND: it is not kept, or not any more.
    """
    if not isinstance(item, ReferenceItem):
        return item
    if item.id not in kept:
        raise not_found(f"{field}.id", item.id[:100], list(kept))
    return read_item(kept[item.id], field)


def shown(item: Item, response_id: str, place: int, field: str) -> dict[str, Any]:
    """Write an item of a request as it is kept and listed: with an id, and its content in parts.

    Args:
        item: no reference.
        response_id: of the request's response.
        place: of the item in the request.
        field: of the item, for errors.
    """
    kind = str(item.type)
    found: dict[str, Any] = {
        "id": item.id or item_id(PREFIXES[kind], response_id, INPUT_ITEMS + place),
        "type": kind,
        "status": "completed",
    }
    if isinstance(item, MessageItem):
        text, said = text_of(item.content, f"{field}.content"), item.role == "assistant"
        part: dict[str, Any] = {"type": "output_text" if said else "input_text", "text": text}
        return found | {"role": item.role, "content": [part | {"annotations": []} if said else part]}
    if isinstance(item, CallItem):
        return found | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
    if isinstance(item, OutputItem):
        return found | {"call_id": item.call_id, "output": text_of(item.output, f"{field}.output")}
    assert isinstance(item, ThoughtItem)
    return found | {"summary": item.summary, "content": item.content}


class Conversation:
    """Messages of the chat endpoint, made of items one after another.

    An answer's thoughts, text and calls are items of their own, and one message there. What begins a conversation as
    system's and developer's messages is one system message: many chat templates take no second one.

    Attributes:
        messages: as in a chat body.
        spelling: what the caller calls the fields of `messages`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.spelling: dict[str, str] = {}
        self._thoughts = ""
        self._answers = False  # whether the last message is an answer that calls may be added to

    def add(self, item: Item, field: str) -> None:
        """Go on with an item; `field` is the caller's name of it.

        Raises:
            TurnoutError: INVALID_ARGUMENT: its content is no text.
        """
        if isinstance(item, ThoughtItem):
            self._thoughts += _thoughts(item, field)
        elif isinstance(item, CallItem):
            self._call(item, field)
        elif isinstance(item, OutputItem):
            output = text_of(item.output, f"{field}.output")
            self._append({"role": "tool", "tool_call_id": item.call_id, "content": output}, field)
        elif isinstance(item, MessageItem):
            self._say(item.role, text_of(item.content, f"{field}.content"), field)

    def instruct(self, text: str) -> None:
        """Begin with instructions."""
        if text:
            self._say("system", text, "instructions")

    def _say(self, role: str, text: str, field: str) -> None:
        if role in SYSTEM and self.messages and all(each["role"] == "system" for each in self.messages):
            self.messages[-1]["content"] += f"\n\n{text}"
            return
        self._append({"role": "system" if role in SYSTEM else role, "content": text}, field)

    def _call(self, item: CallItem, field: str) -> None:
        if not self._answers or self._thoughts:
            self._append({"role": "assistant", "content": None, "tool_calls": []}, field)
        calls = self.messages[-1].setdefault("tool_calls", [])
        self.spelling[f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}.function"] = field
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})

    def _append(self, message: dict[str, Any], field: str) -> None:
        self._answers = message["role"] == "assistant"
        if self._answers and self._thoughts:
            message["reasoning"] = self._thoughts
        self._thoughts = ""
        self.spelling[f"messages.{len(self.messages)}"] = field
        self.messages.append(message)


def _thoughts(item: ThoughtItem, field: str) -> str:
    """What an item says that was thought; what is encrypted elsewhere cannot be read."""
    texts = []
    for place, part in enumerate(item.content):
        if part.get("type") != "reasoning_text" or not isinstance(part.get("text"), str):
            raise invalid(f"{field}.content.{place}", "must be a part of type reasoning_text")
        texts.append(part["text"])
    return "".join(texts)
