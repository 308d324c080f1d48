"""Conversations with tools as a chat template takes them, and as text where it has no place for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Protocol

from turnout.errors import TurnoutError
from turnout.tool_formats import recognised, tool_format
from turnout.tool_formats.base import ToolFormat
from turnout.tools import Tool, ToolCall

PROBES = ("qzxname", "qzxvalue", "qzxresult")  # which no template writes by itself
ID_LENGTH = 9
BASE_36 = "0123456789abcdefghijklmnopqrstuvwxyz"

Turn = dict[str, Any]


class Render(Protocol):
    """Fills the chat template in; raises TurnoutError where it refuses."""

    def __call__(self, turns: list[Turn], tools: list[dict[str, Any]] | None) -> str:
        """Return the text of a conversation."""
        ...


@dataclass(frozen=True, slots=True)
class CallStyle:
    """What a chat template expects of calls in a conversation.

    Attributes:
        as_text: arguments are JSON as text.
        no_content: a message with calls and no text has content None.
        short_ids: ids are nine letters and digits.
    """

    as_text: bool = False
    no_content: bool = False
    short_ids: bool = False

    def turn(self, turn: Turn) -> Turn:
        """A message as the template takes it."""
        made = dict(turn)
        if calls := turn.get("tool_calls"):
            made["tool_calls"] = [self._call(each) for each in calls]
            if self.no_content and not turn["content"]:
                made["content"] = None
        if "tool_call_id" in turn:
            made["tool_call_id"] = self._id(turn["tool_call_id"])
        return made

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.as_text:
            function = {**function, "arguments": _json(function["arguments"])}
        return {**call, "id": self._id(call["id"]), "function": function}

    def _id(self, given: str) -> str:
        if not self.short_ids or (len(given) == ID_LENGTH and given.isalnum() and given.isascii()):
            return given
        number = int.from_bytes(hashlib.sha256(given.encode(errors="replace")).digest())
        return "".join(BASE_36[number // 36**place % 36] for place in range(ID_LENGTH))


def form_of(template: str | Mapping[str, str] | None, vocabulary: Container[str], given: str) -> ToolFormat:
    """Return how a model writes calls.

    Args:
        template: its chat template, or several by name.
        vocabulary: strings of its tokens.
        given: the format's name; "": as template or vocabulary show it.
    """
    if given:
        return tool_format(given)
    return recognised((template or "") if not isinstance(template, Mapping) else "".join(template.values()), vocabulary)


class ToolTemplate:
    """What a model's chat template does with tools, found by filling it in with conversations that say nothing.

    Args:
        form: how the model writes calls.
        render: fills the chat template in.
        special: ids of special tokens by name.

    Attributes:
        form: as given.
    """

    def __init__(self, form: ToolFormat, render: Render, special: Mapping[str, int]) -> None:
        self.form = form
        self._render = render
        self._special = special

    def shown(self, name: str) -> frozenset[int]:
        """Special tokens that the text of an answer with calls in a format shows by their names."""
        return frozenset(self._special[each] for each in tool_format(name).special if each in self._special)

    def filled(self, turns: list[Turn], tools: list[dict[str, Any]]) -> tuple[list[Turn], list[dict[str, Any]] | None]:
        """Return messages and tools as the template takes them.

        Args:
            turns: messages; arguments of calls are values.
            tools: offered, as templates expect them.
        """
        called = any("tool_calls" in turn or turn["role"] == "tool" for turn in turns)
        if not (called or tools):
            return turns, None
        if called:
            turns = self._as_text(turns) if self._style is None else [self._style.turn(turn) for turn in turns]
        if not tools or self._offers:
            return turns, tools or None
        return self._with_system(turns, self._description(tools)), None

    @cached_property
    def _offers(self) -> bool:
        """Whether the template writes the tools that are offered."""
        tool = Tool(PROBES[0]).for_template
        return PROBES[0] in self._rendered([{"role": "user", "content": "a"}], [tool])

    @cached_property
    def _takes_system(self) -> bool:
        turns = [{"role": "system", "content": PROBES[0]}, {"role": "user", "content": "a"}]
        return PROBES[0] in self._rendered(turns, None)

    @cached_property
    def _style(self) -> CallStyle | None:
        """What the template expects of calls; None: it does not write them with their results."""
        for short_ids, as_text, no_content in product((False, True), repeat=3):
            style = CallStyle(as_text, no_content, short_ids)
            call = ToolCall("call_" + "0" * 24, PROBES[0], f'{{"a": "{PROBES[1]}"}}').for_template
            turns: list[Turn] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": PROBES[2], "tool_call_id": call["id"], "name": PROBES[0]},
            ]
            tools = [Tool(PROBES[0]).for_template] if self._offers else None
            text = self._rendered([style.turn(turn) for turn in turns], tools)
            places = [text.rfind(probe) for probe in PROBES]
            if -1 not in places and places == sorted(places):
                return style
        return None

    def _rendered(self, turns: list[Turn], tools: list[dict[str, Any]] | None) -> str:
        with suppress(TurnoutError):
            return self._render(turns, tools)
        return ""

    def _as_text(self, turns: list[Turn]) -> list[Turn]:
        """Messages with calls as the model would have written them, and results as a user's."""
        made: list[Turn] = []
        for turn in turns:
            plain = {"role": turn["role"], "content": turn["content"]}
            if calls := turn.get("tool_calls"):
                functions = [each["function"] for each in calls]
                written = [ToolCall("", each["name"], _json(each["arguments"])) for each in functions]
                plain["content"] = "\n".join(filter(None, (turn["content"], self.form.written(written))))
            elif turn["role"] == "tool":
                plain = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
            # Many templates want turns to alternate.
            if made and made[-1]["role"] == plain["role"] == "user":
                plain["content"] = f"{made.pop()['content']}\n{plain['content']}"
            made.append(plain)
        return made

    def _with_system(self, turns: list[Turn], text: str) -> list[Turn]:
        """Messages with a text among the system's, or before the first of a user's where the template has no system."""
        role = "system" if self._takes_system else "user"
        first = turns[0] if turns else {}
        if first.get("role") == role and isinstance(first["content"], str):
            words = (first["content"], text) if role == "system" else (text, first["content"])
            return [{**first, "content": "\n\n".join(filter(None, words))}, *turns[1:]]
        return [{"role": role, "content": text}, *turns]

    def _description(self, tools: list[dict[str, Any]]) -> str:
        syntax = self.form.syntaxes[0]
        example = syntax.framed([("FUNCTION", syntax.arguments.example)])
        lines = [
            "You may call functions to help with the user's request. These are the functions, as JSON:",
            *(_json(each["function"]) for each in tools),
            "To call one, write this and nothing after it, with the function's name and arguments that fit its"
            " parameters:",
            example,
        ]
        if not self.form.single:
            pair = [(name, syntax.arguments.short) for name in ("FIRST", "SECOND")]
            lines += ["To call several at once, write:", syntax.framed(pair)]
        return "\n".join([*lines, "You get the results in the next message. Otherwise answer in words."])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
