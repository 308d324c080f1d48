"""Conversations with tools as a chat template takes them, and as text where it has no place for them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Protocol

from turnout.errors import TurnoutError
from turnout.tool_formats import recognised, tool_format
from turnout.tool_formats.base import ToolFormat
from turnout.tools import Tool, ToolCall

# No template writes these by itself.
NAME, SAID = "qzxname", "qzxsaid"
PAIRS = (("qzxvalue", "qzxresult"), ("qzxother", "qzxsecond"))  # of a call and its result
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
        single: a message has one call, and its result follows.
        silent: a message with calls has no text: the template would write that instead of them.
        either: a message with calls has text or thinking, not both.
        joint: blanks that the template writes between text and calls, which may stand at the text's end already.
    """

    as_text: bool = False
    no_content: bool = False
    short_ids: bool = False
    single: bool = False
    silent: bool = False
    either: bool = False
    joint: str = ""

    def turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """Messages as the template takes them."""
        return [self._turn(each) for each in (_one_by_one(turns) if self.single else turns)]

    def _turn(self, turn: Turn) -> Turn:
        made = dict(turn)
        if calls := turn.get("tool_calls"):
            made["tool_calls"] = [self._call(each) for each in calls]
            if made["content"]:
                dropped = self.silent or (self.either and "reasoning" in turn)
                made["content"] = "" if dropped else made["content"].removesuffix(self.joint)
            if self.no_content and not made["content"]:
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
        form = tool_format(name)
        return frozenset(token_id for each, token_id in self._special.items() if form.shows(each))

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
            turns = self._as_text(turns) if self._style is None else self._style.turns(turns)
        if not tools or self._offers:
            return turns, tools or None
        return self._with_system(turns, self._description(tools)), None

    @cached_property
    def _offers(self) -> bool:
        """Whether the template writes the tools that are offered."""
        tool = Tool(NAME).for_template
        return NAME in self._rendered([{"role": "user", "content": "a"}], [tool])

    @cached_property
    def _takes_system(self) -> bool:
        turns = [{"role": "system", "content": SAID}, {"role": "user", "content": "a"}]
        return SAID in self._rendered(turns, None)

    @cached_property
    def _style(self) -> CallStyle | None:
        """What the template expects of calls; None: it does not write them with their results."""
        for short_ids, as_text, no_content in product((False, True), repeat=3):
            style = CallStyle(as_text, no_content, short_ids)
            if self._writes(style):
                break
        else:
            return None
        if not self._writes(style, count=2) and self._writes(one := replace(style, single=True), count=2):
            style = one
        if not self._writes(style, SAID):
            others = (replace(style, either=True), replace(style, silent=True))
            return next((each for each in others if self._writes_all(each)), style)
        joint = re.search(rf"{SAID}(\s+)\S", self._with_calls(style, SAID, 1, thinks=True))
        return replace(style, joint=joint[1] if joint else "")

    def _writes_all(self, style: CallStyle) -> bool:
        """Whether the template writes calls next to text and thinking, and next to text alone."""
        return self._writes(style, SAID) and self._writes(style, SAID, thinks=False)

    def _writes(self, style: CallStyle, said: str = "", count: int = 1, thinks: bool = True) -> bool:
        """Whether the template writes a message with calls, each before its result."""
        text = self._with_calls(style, said, count, thinks)
        places = [(text.rfind(value), text.rfind(result)) for value, result in PAIRS[:count]]
        ordered = places == sorted(places) and all(-1 < value < result for value, result in places)
        # Some templates name the function with its result again, and some with that alone.
        return ordered and text[: places[0][0]].count(NAME) > self._with_calls(style, "", 0, thinks=False).count(NAME)

    def _with_calls(self, style: CallStyle, said: str, count: int, thinks: bool) -> str:
        """Text of a conversation that ends with calls and their results, or with the question before them."""
        calls = [
            ToolCall(f"call_{place:024}", NAME, _json({"a": value})).for_template
            for place, (value, _) in enumerate(PAIRS[:count])
        ]
        turns: list[Turn] = [{"role": "user", "content": "a"}]
        if calls:
            thought = dict.fromkeys(("reasoning", "reasoning_content"), "a") if said and thinks else {}
            turns.append({"role": "assistant", "content": said, "tool_calls": calls, **thought})
        for call, (_, result) in zip(calls, PAIRS, strict=False):
            turns.append({"role": "tool", "content": result, "tool_call_id": call["id"], "name": NAME})
        return self._rendered(style.turns(turns), [Tool(NAME).for_template] if self._offers else None)

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
                plain["content"] = "\n".join(
                    filter(None, (turn["content"].removesuffix("\n"), self.form.written(written)))
                )
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


def _one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """Messages of which none has several calls: what is said and thought stands with the first of them."""
    made: list[Turn] = []
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        calls = turn.get("tool_calls", [])
        if len(calls) < 2:
            made.append(turn)
            continue
        results: dict[str | None, list[Turn]] = {}
        while at < len(turns) and turns[at]["role"] == "tool":
            results.setdefault(turns[at].get("tool_call_id"), []).append(turns[at])
            at += 1
        for place, call in enumerate(calls):
            made.append({**(turn if place == 0 else {"role": turn["role"], "content": ""}), "tool_calls": [call]})
            made += results.pop(call["id"], [])
        made += [each for left in results.values() for each in left]
    return made


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
