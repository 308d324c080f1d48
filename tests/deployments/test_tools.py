"""Tools in chat: what is offered, the form of a call, and calls read out of answers, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deployments.faults import respell
from deployments.openai_format import ChatFormat
from deployments.response_format import format_of
from deployments.schemas import chat_job
from deployments.tools import END_MARK, MARK, ToolFormat
from pool.text import TextTokenizer
from tests.constrained import byte_compiler, fits
from training.random_models import byte_tokenizer
from turnout.calls import ChatMessage, Chunk
from turnout.errors import TurnoutError
from turnout.structure import Structure
from turnout.tools import Tool, ToolCall
from turnout.types import FinishReason

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Bern", "Oslo"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
USER = {"role": "user", "content": "Weather in Bern?"}
CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
OTHER = '{"name": "weather", "arguments": {"city": "Rome"}}'

ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


def with_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"function": {"name": "f", "parameters": schema}}]}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def structure(**body: Any) -> Structure | None:
    call = chat_job({"messages": [USER], "tools": TOOLS, **body}).calls[0]
    assert [tool.name for tool in call.tools] == ["weather", "now"]
    return call.sampling.structure


def test_null_is_as_good_as_absent_in_what_clients_send_back() -> None:
    known = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [known], "refusal": None, "audio": None}
    offered = {"function": {"name": "now", "description": None, "parameters": None, "strict": None}}
    turns = [USER, said, {"role": "tool", "tool_call_id": "c", "content": "12:00", "name": None}]
    spelt, short = (
        chat_job({"messages": messages, "tools": tools}).calls[0]
        for messages, tools in (
            (turns, [offered]),
            (
                [USER, {"role": "assistant", "tool_calls": [known]}, {**turns[2]} | {"name": "x"}],
                [{"function": {"name": "now"}}],
            ),
        )
    )
    assert (spelt.messages, spelt.tools) == (short.messages, short.tools)
    assert chat_job({"messages": [{**USER, "tool_calls": None}]}).calls[0].messages == (ChatMessage(**USER),)
    with pytest.raises(TurnoutError, match="refusal"):
        chat_job({"messages": [{**USER, "refusal": "no"}]})
    with pytest.raises(TurnoutError) as refused:
        chat_job({"messages": [{"role": None, "content": "x"}]})
    assert refused.value.field == "messages.0.role"


def test_a_call_that_must_come_fits_the_functions_schema() -> None:
    required = structure(tool_choice="required")
    assert required is not None
    for text, good in ((CALL, True), (OTHER, False), ('{"name": "now", "arguments": {}}', True), ("Hi", False)):
        assert fits(byte_compiler(), required, text) == good
    jsonschema.validate(json.loads(CALL), required.schema_value)
    named = structure(tool_choice={"type": "function", "function": {"name": "now"}})
    assert named is not None
    assert not fits(byte_compiler(), named, CALL)
    assert structure(tool_choice="none") is None


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_call_may_come_and_then_fits(choice: dict[str, Any]) -> None:
    free = structure(**choice)
    assert free is not None
    good = ["", "It is warm.", "a { b", CALL, MARK + CALL + END_MARK, "Let me see.\n" + MARK + CALL + END_MARK]
    assert [text for text in good if not fits(byte_compiler(), free, text)] == []
    assert not fits(byte_compiler(), free, OTHER)
    assert not fits(byte_compiler(), free, CALL.replace("{", "{\n\n"))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_are_an_object(choice: str) -> None:
    body = with_parameters({"properties": {"city": {"type": "string"}}})
    made = chat_job({"messages": [USER], "tool_choice": choice, **body}).calls[0].sampling.structure
    assert made is not None
    call = '{"name": "f", "arguments": %s}'
    assert fits(byte_compiler(), made, call % '{"city": "Bern"}')
    assert not fits(byte_compiler(), made, call % "5")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_references_hold_within_their_own_tool(choice: str) -> None:
    """Anchors, identifiers and definitions of the same names mean another thing in each of two tools."""
    kinds = {"f": ("boolean", "true"), "g": ("null", "null")}
    tools = []
    for name, (kind, _) in kinds.items():
        inner = {"$id": "inner", "$defs": {"x": {"type": kind}}, "$ref": "#/$defs/x"}
        properties = {"a": {"$ref": "#P"}, "b": {"$ref": "inner"}, "c": {"$ref": "#/$defs/p"}, "more": {"$ref": "#"}}
        schema = {"$defs": {"p": {"$anchor": "P", "type": kind}, "q": inner}, "properties": properties}
        tools.append({"function": {"name": name, "parameters": {**schema, "additionalProperties": False}}})
    made = chat_job({"messages": [USER], "tools": tools, "tool_choice": choice}).calls[0].sampling.structure
    assert made is not None
    for name, (_, own) in kinds.items():
        for _, value in kinds.values():
            arguments = f'{{"a": {value}, "b": {value}, "c": {value}, "more": {{"a": {value}}}}}'
            call = f'{{"name": "{name}", "arguments": {arguments}}}'
            assert fits(byte_compiler(), made, call) == (value == own)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
        ({"properties": {"a": {"$ref": "#P"}}, "$defs": {"p": {"$anchor": "P", "oneOf": [{}, {}]}}}, "$defs.p.oneOf"),
        (
            {"properties": {"a": {"minimum": 3, "maximum": 2, "type": "integer"}}, "required": ["a"]},
            "properties.a.minimum",
        ),
    ],
)
def test_what_the_library_refuses_is_named_in_the_tool_it_stands_in(
    choice: str, schema: dict[str, Any], place: str
) -> None:
    tools = [{"function": {"name": "now"}}, {"function": {"name": "f", "parameters": schema}}]
    job = chat_job({"messages": [USER], "tools": tools, "tool_choice": choice})
    made = job.calls[0].sampling.structure
    assert made is not None
    with pytest.raises(TurnoutError) as refused:
        byte_compiler().compile(made)
    assert respell(refused.value, job.spelling).field == f"tools.1.function.parameters.{place}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name"),
        (with_parameters(nested(350)), "tools.0.function.parameters"),
        (with_parameters({"type": "array"}), "tools.0.function.parameters.type"),
        (with_parameters({"x-guidance": {"lenient": True}}), "tools.0.function.parameters"),
        (with_parameters(ENDLESS), "tools.0.function.parameters.properties.a.$ref"),
        (with_parameters({"properties": {"a": {"$ref": "#P"}}}), "tools.0.function.parameters.properties.a.$ref"),
        (with_parameters({"properties": {"a": {"not": {}}}}), "tools.0.function.parameters.properties.a.not"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
                ]
            },
            "messages.0.tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_bad_input_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        chat_job({"messages": [USER], **body})
    assert refused.value.field == field


def test_a_whole_answer_with_a_call() -> None:
    form = ToolFormat(ChatFormat())
    made = form.choice(Chunk(0, "See.\n" + MARK + CALL + END_MARK, (), FinishReason.STOP), False)
    [call] = made["message"]["tool_calls"]
    assert made["finish_reason"] == "tool_calls"
    assert made["message"]["content"] == "See.\n"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    cut = form.choice(Chunk(0, CALL[:20], (), FinishReason.LENGTH), False)
    assert (cut["message"]["content"], cut["finish_reason"]) == (CALL[:20], "length")
    text = form.choice(Chunk(0, "Warm.", (), FinishReason.STOP), False)
    assert (text["message"]["content"], text["finish_reason"]) == ("Warm.", "stop")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        "See <this>.\n" + MARK + CALL + END_MARK,
        "Use {x} it is. " + MARK + CALL + END_MARK,
        "Use {x}.",
        "Warm < 30 {",
        "",
    ],
)
@pytest.mark.parametrize("ends_apart", [True, False])
def test_a_stream_says_what_the_whole_answer_says(text: str, size: int, ends_apart: bool) -> None:
    form = ToolFormat(ChatFormat())
    first, *parts = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    if "{x}" in first:  # the rest of an answer may come at once, and begin as a call does
        first, parts = first[:4], [first[4:], *parts]
    parts = [first, *parts, ""] if ends_apart else [first, *parts]
    deltas = [form.delta(Chunk(0, part, ()), False) for part in parts[:-1]]
    deltas.append(form.delta(Chunk(0, parts[-1], (), FinishReason.STOP), False))
    whole = ToolFormat(ChatFormat()).choice(Chunk(0, text, (), FinishReason.STOP), False)
    said = "".join(each["delta"].get("content", "") for each in deltas)
    calls = [call for each in deltas for call in each["delta"].get("tool_calls", ())]
    assert said == (whole["message"]["content"] or "")
    assert [call["function"] for call in calls] == [each["function"] for each in whole["message"].get("tool_calls", ())]
    assert deltas[-1]["finish_reason"] == whole["finish_reason"]
    assert deltas[0]["delta"]["role"] == "assistant"


def test_one_form_for_what_a_body_asks_for() -> None:
    """Of the endpoint and of batch lines: calls are read out, and tokens told."""
    job = chat_job({"messages": [USER], "tools": TOOLS, "decoding": {"tokens": True}})
    made = format_of(ChatFormat(), job.calls[0]).choice(Chunk(0, CALL, (), FinishReason.STOP), False)
    assert made["finish_reason"] == "tool_calls"
    assert made["turnout"] == {"tokens": []}
    plain = chat_job({"messages": [USER], "tools": TOOLS, "tool_choice": "none"})
    assert isinstance(format_of(ChatFormat(), plain.calls[0]), ChatFormat)


def test_templates_with_and_without_a_place_for_tools(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    plain.save_pretrained(tmp_path / "plain")
    tool, turns = Tool("weather", "of a city", json.dumps(WEATHER)), [ChatMessage("user", "x")]
    with pytest.raises(TurnoutError, match="no place for tools") as refused:
        TextTokenizer(tmp_path / "plain").encode_chat(turns, [tool])
    assert refused.value.field == "tools"
    plain.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.city }}{% endfor %}"
        "{{ m.tool_call_id or '' }}{% endfor %}"
    )
    plain.save_pretrained(tmp_path / "tools")
    tokenizer = TextTokenizer(tmp_path / "tools")
    turns += [
        ChatMessage("assistant", "", (ToolCall("c1", "weather", '{"city": "Bern"}'),)),
        ChatMessage("tool", "warm", (), "c1"),
    ]
    assert (
        tokenizer.decode(tokenizer.encode_chat(turns, [tool])) == "weather;[user]x[assistant]weather=Bern[tool]warmc1"
    )
