"""Tools in chat requests: what is offered, the form a call then has, and calls found in answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from decoding.constraints.flat_schemas import FlatSchema
from decoding.constraints.keywords import place_in, placed
from decoding.constraints.schemas import ENDLESS, endless
from deployments.openai_format import ChatFormat
from deployments.openapi.answers import ChatChoice, ToolCallObject
from deployments.openapi.events import ChatPart
from deployments.request_fields import BodyPart
from turnout.calls import Chunk, GenerateCall
from turnout.errors import invalid
from turnout.registry import validated
from turnout.structure import JSON_FORM, Structure
from turnout.tools import Tool, ToolCall, ToolCallPart

MAX_TOOLS = 128
MARK, END_MARK = "<tool_call>\n", "\n</tool_call>"
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class FunctionBody(BodyPart):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str = ""
    parameters: Annotated[dict[str, Any], Field(default_factory=dict, description="JSON schema of the arguments")]
    strict: Annotated[bool | None, Field(description="accepted and ignored: arguments fit either way")] = None


class ToolBody(BodyPart):
    """One of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionBody


class NamedFunction(BodyPart):
    """The function that must be called."""

    name: str


class NamedTool(BodyPart):
    """`tool_choice` of one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(BodyPart):
    """What was called."""

    name: Annotated[str, Field(pattern=NAME)]
    arguments: Annotated[str, Field(description='a JSON object, as text; "" and null are {}')] = ""
    parsed_arguments: Annotated[Any, Field(description="accepted and ignored")] = None


class CalledTool(BodyPart):
    """One of an assistant message's `tool_calls`."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Field(description="accepted and ignored: parts of streams have it")] = None
    extra_content: Annotated[Any, Field(description="accepted and ignored")] = None
    provider_specific_fields: Annotated[Any, Field(description="accepted and ignored")] = None


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def offered(tools: list[ToolBody], choice: ToolChoice | None) -> tuple[tuple[Tool, ...], Structure | None]:
    """The tools of a body, and what the answer must fit so that a call among them can be read.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    if not tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice", "needs tools")
        return (), None
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} (got {len(tools)})")
    functions = {each.function.name: each.function for each in tools}
    if len(functions) < len(tools):
        raise invalid("tools", "two have the same name")
    definitions = _definitions(tools)
    made = tuple(Tool(each.name, each.description, json.dumps(each.parameters)) for each in functions.values())
    if choice == "none":
        return made, None
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            raise invalid("tool_choice.function.name", f"must be one of {', '.join(functions)}")
        functions = {choice.function.name: functions[choice.function.name]}
    schema = _call_schema(list(functions), definitions)
    if choice in (None, "auto"):
        return made, validated(Structure, {"grammar": _free_or_call(schema)}, "tools")
    return made, validated(Structure, {"json_schema": schema}, "tools")


def _definitions(tools: list[ToolBody]) -> dict[str, Any]:
    """JSON schemas by name, as they stand in one schema of a call: `tool_NAME` for a function's arguments.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the tool's parameters and the keyword in them.
    """
    made: dict[str, Any] = {}
    for place, each in enumerate(tools):
        under, schema = f"{place}.function.parameters", each.function.parameters
        field, own = f"tools.{under}", f"tool_{each.function.name}"
        validated(Structure, {"json_schema": schema}, field)
        if schema.get("type", "object") != "object":
            raise invalid(f"{field}.type", "must be object: arguments are given by name")
        flat = FlatSchema(schema, field, under, len(made))
        found = flat.definitions | {own: placed({"type": "object", **flat.root}, [((), under)])}
        whole = {"$ref": f"#/$defs/{own}", "$defs": found}
        path = endless(whole)
        if path is not None:
            raise invalid(f"tools.{place_in(whole, path)}", f"no arguments fit the JSON schema: {ENDLESS}")
        made |= found
    return made


def _call_schema(names: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of a call of one of these functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool_{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"$defs": definitions, **(calls[0] if len(calls) == 1 else {"anyOf": calls})}


def _free_or_call(schema: dict[str, Any]) -> str:
    """Any text that does not begin as a call; a call; or text with a marked call at its end."""
    call = json.dumps({"x-guidance": JSON_FORM, **schema}, ensure_ascii=False)
    return "\n".join(
        [
            "start: TEXT | call | trigger call END",
            f"trigger[lazy]: TEXT {json.dumps(MARK)}",
            f"END: {json.dumps(END_MARK)}",
            r"TEXT: /([^{](.|\n)*)?/",
            f"call: %json {call}",
        ]
    )


def call_in(text: str, begun: bool = False) -> tuple[str, ToolCall | None]:
    """What is said before a call, and the call; an answer without one is all said.

    Args:
        text: an answer, or the rest of one.
        begun: something was said before it, so that only a marked call can follow.
    """
    bare = text.startswith("{") and not begun
    said, mark, rest = ("", "", text) if bare else text.partition(MARK)
    if not (mark or bare):
        return text, None
    try:
        call = json.loads(rest.removesuffix(END_MARK))
        made = ToolCall(f"call_{uuid4().hex[:24]}", call["name"], json.dumps(call["arguments"], ensure_ascii=False))
    except (ValueError, KeyError, TypeError):
        return text, None
    return said, made


def may_call(call: GenerateCall) -> bool:
    """Whether calls of tools are to be read out of a call's answers."""
    return bool(call.tools) and call.sampling.structure is not None


class CallReader:
    """Reads calls of tools out of answers. A call comes at once, when it is whole."""

    def __init__(self) -> None:
        self._held: dict[int, str] = {}
        self._begun: set[int] = set()

    def whole(self, chunk: Chunk) -> Chunk:
        """A finished answer: what is said, and the call."""
        said, call = call_in(chunk.text)
        return chunk if call is None else replace(chunk, text=said, tool_calls=(call,))

    def part(self, chunk: Chunk) -> Chunk:
        """New output of an answer; text that may become a call is held back."""
        text = self._held.pop(chunk.index, "") + chunk.text
        call = None
        if chunk.finish_reason is None:
            shown = self._shown(chunk.index, text)
            self._held[chunk.index] = text[shown:]
            text = text[:shown]
        else:
            text, call = call_in(text, chunk.index in self._begun)
        if text:
            self._begun.add(chunk.index)
        if call is None:
            return replace(chunk, text=text)
        return replace(
            chunk,
            text=text,
            tool_calls=(call,),
            call_parts=(ToolCallPart(0, call.id, call.name, call.arguments),),
        )

    def _shown(self, index: int, text: str) -> int:
        """How many characters are no part of a call, whatever comes next."""
        if index not in self._begun and text.startswith("{"):
            return 0
        at = text.find(MARK)
        if at >= 0:
            return at
        longest = next((n for n in range(len(MARK) - 1, 0, -1) if text.endswith(MARK[:n])), 0)
        return len(text) - longest


class ToolFormat:
    """The chat endpoint's format, with calls read out of the answers."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._reader = CallReader()
        self.prefix, self.whole, self.part = form.prefix, form.whole, form.part

    def choice(self, chunk: Chunk, logprobs: bool) -> ChatChoice:
        """Write a finished choice."""
        read = self._reader.whole(chunk)
        made = self._form.choice(read, logprobs)
        if read.tool_calls:
            made["message"]["content"] = read.text or None
            made["message"]["tool_calls"] = [_call_object(call) for call in read.tool_calls]
            made["finish_reason"] = "tool_calls"
        return made

    def delta(self, chunk: Chunk, logprobs: bool) -> ChatPart:
        """Write new output of a choice."""
        read = self._reader.part(chunk)
        made = self._form.delta(read, logprobs)
        if not read.text:
            del made["delta"]["content"]
        if read.call_parts:
            made["delta"]["tool_calls"] = [
                {"index": part.index, **_call_object(ToolCall(part.id, part.name, part.arguments))}
                for part in read.call_parts
            ]
        if read.tool_calls:
            made["finish_reason"] = "tool_calls"
        return made


def _call_object(call: ToolCall) -> ToolCallObject:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
