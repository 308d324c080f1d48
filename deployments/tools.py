"""Tools in chat requests: what is offered, what a call then must fit, and calls read out of answers."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from decoding.grammars.flat_schemas import FlatSchema
from decoding.grammars.keywords import place_in, placed
from decoding.grammars.schemas import ENDLESS, endless
from decoding.structures import checked_structure
from deployments.openai_format import ChatFormat
from deployments.openapi.answers import ChatChoice, ToolCallObject
from deployments.openapi.events import ChatPart
from deployments.openapi.events import ToolCallPart as ToolCallPartObject
from deployments.request_fields import BodyPart
from turnout.calls import READ, Chunk, GenerateCall
from turnout.errors import invalid
from turnout.structure import Structure
from turnout.tool_formats import tool_format
from turnout.tool_formats.grammar import CallRules
from turnout.tool_formats.parser import NO_FUNCTIONS, Argued, Called, CallParser, Ended, Event, Said
from turnout.tools import Tool, ToolCall, ToolCallPart
from turnout.types import FinishReason

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
ID_CHARS = string.ascii_letters + string.digits


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


class AllowedTool(BodyPart):
    """One of the functions that may be called; its name stands here, or in `function`."""

    type: Literal["function"] = "function"
    name: str = ""
    function: NamedFunction | None = None


class AllowedTools(BodyPart):
    """Some of `tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


class AllowedToolsChoice(BodyPart):
    """`tool_choice` of some of the functions; all stay in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools | None = None
    mode: Annotated[Literal["auto", "required"], Field(description="instead of allowed_tools.mode")] = "auto"
    tools: Annotated[list[AllowedTool], Field(description="instead of allowed_tools.tools")] = Field(
        default_factory=list
    )


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


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


def offered(
    tools: list[ToolBody], choice: ToolChoice | None, parallel: bool = True, answer: Structure | None = None
) -> tuple[tuple[Tool, ...], Structure | None]:
    """The tools of a body, and what the answer must fit so that calls of them can be read.

    Args:
        tools: of the body.
        choice: `tool_choice`; None: auto.
        parallel: whether an answer may call several.
        answer: what an answer that calls none must fit.

    Returns:
        The tools, and what holds for the answer: calls and `answer` together, or `answer` where nothing is called.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    if not tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice", "needs tools")
        return (), answer
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} (got {len(tools)})")
    functions = {each.function.name: each.function for each in tools}
    if len(functions) < len(tools):
        raise invalid("tools", "two have the same name")
    schemas = _schemas(tools)
    made = tuple(Tool(each.name, each.description, json.dumps(each.parameters)) for each in functions.values())
    if choice == "none":
        return made, answer
    names, required = _chosen(list(functions), choice)
    several = parallel and not isinstance(choice, NamedTool)
    rules = CallRules({name: schemas[name] for name in names}, required, several, answer)
    try:
        return made, rules.structure
    except ValueError:
        raise invalid("tools", "are too large together") from None


def _chosen(functions: list[str], choice: ToolChoice | None) -> tuple[list[str], bool]:
    """The functions that may be called, and whether one must be."""
    if isinstance(choice, NamedTool):
        return [_known(choice.function.name, functions, "tool_choice.function.name")], True
    if not isinstance(choice, AllowedToolsChoice):
        return functions, choice == "required"
    field, allowed = "tool_choice.allowed_tools", choice.allowed_tools
    if allowed is None:
        field = "tool_choice"
        allowed = AllowedTools.model_construct(mode=choice.mode, tools=choice.tools)
    if not allowed.tools:
        raise invalid(f"{field}.tools", "must not be empty")
    names = [
        _known(each.name, functions, f"{field}.tools.{place}.name")
        if each.function is None
        else _known(each.function.name, functions, f"{field}.tools.{place}.function.name")
        for place, each in enumerate(allowed.tools)
    ]
    return list(dict.fromkeys(names)), allowed.mode == "required"


def choice_name(choice: ToolChoice | None) -> str:
    """`GenerateCall.tool_choice` of a body's."""
    if isinstance(choice, NamedTool):
        return choice.function.name
    if isinstance(choice, AllowedToolsChoice):
        choice = choice.mode if choice.allowed_tools is None else choice.allowed_tools.mode
    return "" if choice in (None, "auto") else choice


def _known(name: str, functions: list[str], field: str) -> str:
    if name not in functions:
        raise invalid(field, f"must be one of {', '.join(functions)}")
    return name


def _schemas(tools: list[ToolBody]) -> dict[str, Any]:
    """JSON schema of the arguments by function.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the tool's parameters and the keyword in them.
    """
    made: dict[str, Any] = {}
    for place, each in enumerate(tools):
        under, schema = f"{place}.function.parameters", each.function.parameters
        field = f"tools.{under}"
        checked_structure({"json_schema": schema}, field)
        if schema.get("type", "object") != "object":
            raise invalid(f"{field}.type", "must be object: arguments are given by name")
        flat = FlatSchema(schema, field, under)
        # A level of its own: what refers to the whole of it means what stands there.
        own = placed({"type": "object", **flat.root}, [((), under)])
        whole = {"$ref": "#/$defs/arguments", "$defs": {**flat.definitions, "arguments": own}}
        path = endless(whole)
        if path is not None:
            raise invalid(f"tools.{place_in(whole, path)}", f"no arguments fit the JSON schema: {ENDLESS}")
        made[each.function.name] = whole
    return made


def functions_of(call: GenerateCall) -> Mapping[str, Any] | None:
    """JSON schemas of arguments by function that a call's answers may call; None: they may call none."""
    structure = call.sampling.structure
    return CallRules.of(structure).functions if structure is not None and structure.kind == "tools" else None


def reader_of(call: GenerateCall) -> CallReader | None:
    """Make a reader of a call's answers; None: they may call nothing."""
    functions = functions_of(call)
    return None if functions is None else CallReader(functions)


@dataclass(slots=True)
class _Reading:
    """An answer that is being read; calls that have ended are `calls`."""

    parser: CallParser
    short_ids: bool
    calls: list[ToolCall] = field(default_factory=list)
    begun: int = 0
    open: ToolCall | None = None
    done: bool = False  # the end of a call is the last there is

    def parts(self, events: list[Event]) -> Iterator[Said | ToolCallPart | Ended]:
        """Turn events into parts of calls, and keep what has ended."""
        for event in events:
            self.done = isinstance(event, Ended) and not event.broken
            match event:
                case Said():
                    yield event
                case Called(name):
                    self.open = ToolCall(_new_id(self.short_ids), name, "")
                    self.begun += 1
                    yield ToolCallPart(self.begun - 1, self.open.id, name)
                case Argued(text):
                    assert self.open is not None
                    self.open = replace(self.open, arguments=self.open.arguments + text)
                    yield ToolCallPart(self.begun - 1, arguments=text)
                case Ended(broken):
                    assert self.open is not None
                    if not broken:
                        self.calls.append(self.open)
                    yield event


def _new_id(short: bool) -> str:
    return "".join(secrets.choice(ID_CHARS) for _ in range(9)) if short else f"call_{uuid4().hex[:24]}"


class CallReader:
    """Reader of calls of tools in answers, whole or as they come.

    What is no call stays text. A call whose arguments are cut, or are no JSON, is text of a whole answer; in a stream
    its parts are given before that is known, and the rest is text.

    Args:
        functions: JSON schemas of arguments by function; see `CallParser`.
    """

    def __init__(self, functions: Mapping[str, Any] = NO_FUNCTIONS) -> None:
        self._functions = functions
        self._readings: dict[int, _Reading] = {}

    def whole(self, chunk: Chunk) -> Chunk:
        """A finished answer: what is said, and the calls."""
        if chunk.tool_format == READ:
            return _whole_calls(chunk)
        reading = self._new(chunk)
        said, thought = [], [chunk.reasoning]
        for part in reading.parts(reading.parser.feed(chunk.text, final=True)):
            if isinstance(part, Ended):
                said.append(part.broken)
            elif isinstance(part, Said):
                (thought if part.thought else said).append(part.text)
        return self._finished(replace(chunk, text="".join(said), reasoning="".join(thought)), reading)

    def part(self, chunk: Chunk) -> Chunk:
        """New output of an answer: what is said, and what is new of calls; all calls with the last of it."""
        if chunk.tool_format == READ:
            return chunk
        if (reading := self._readings.get(chunk.index)) is None:
            reading = self._readings[chunk.index] = self._new(chunk)
        said, thought = "", chunk.reasoning
        new: list[ToolCallPart] = []
        final = chunk.finish_reason is not None
        for part in reading.parts(reading.parser.feed(chunk.text, final)):
            if isinstance(part, ToolCallPart):
                if new and new[-1].index == part.index:
                    new[-1] = replace(new[-1], arguments=new[-1].arguments + part.arguments)
                else:
                    new.append(part)
            elif isinstance(part, Ended):
                said += part.rest
            elif part.thought:
                thought += part.text
            else:
                said += part.text
        read = replace(chunk, text=said, reasoning=thought, call_parts=tuple(new))
        return self._finished(read, reading) if final else read

    def _finished(self, chunk: Chunk, reading: _Reading) -> Chunk:
        """The last of an answer with its calls: one that ends in a call has ended, wherever it was cut."""
        reason = FinishReason.STOP if reading.done else chunk.finish_reason
        return replace(chunk, tool_calls=tuple(reading.calls), finish_reason=reason)

    def _new(self, chunk: Chunk) -> _Reading:
        form = tool_format(chunk.tool_format)
        return _Reading(CallParser(form, self._functions), form.short_ids)


def _whole_calls(chunk: Chunk) -> Chunk:
    """An answer whose calls were read elsewhere: those that were cut, or are no objects, are text of it."""
    kept = tuple(each for each in chunk.tool_calls if _is_object(each.arguments))
    cut = "".join(each.arguments for each in chunk.tool_calls if each not in kept)
    return replace(chunk, text=chunk.text + cut, tool_calls=kept, call_parts=())


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


class ToolChatFormat:
    """The chat endpoint's format, with calls read out of the answers."""

    def __init__(self, form: ChatFormat, reader: CallReader) -> None:
        self._form = form
        self._reader = reader
        self.prefix, self.whole, self.part = form.prefix, form.whole, form.part

    def choice(self, chunk: Chunk, logprobs: bool) -> ChatChoice:
        """Write a finished choice."""
        read = self._reader.whole(chunk)
        made = self._form.choice(read, logprobs)
        if read.tool_calls:
            made["message"]["content"] = read.text or None
            made["message"]["tool_calls"] = [_call_object(call) for call in read.tool_calls]
            made["finish_reason"] = called_or(read)
        return made

    def delta(self, chunk: Chunk, logprobs: bool) -> ChatPart:
        """Write new output of a choice."""
        read = self._reader.part(chunk)
        made = self._form.delta(read, logprobs)
        if not read.text:
            made["delta"].pop("content", None)
        if read.call_parts:
            made["delta"]["tool_calls"] = [_part_object(part) for part in read.call_parts]
        if read.tool_calls:
            made["finish_reason"] = called_or(read)
        return made


def called_or(chunk: Chunk) -> Literal["tool_calls"] | FinishReason:
    """The finish reason of an answer with calls: that one, unless it was cut."""
    return chunk.finish_reason if chunk.finish_reason is FinishReason.LENGTH else "tool_calls"


def _call_object(call: ToolCall) -> ToolCallObject:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _part_object(part: ToolCallPart) -> ToolCallPartObject:
    if not part.id:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    call = _call_object(ToolCall(part.id, part.name, part.arguments))
    return {"index": part.index, "id": call["id"], "type": call["type"], "function": {**call["function"]}}
