"""Tools in chat: what is offered, the form of a call, and calls read out of answers, whole and streamed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from decoding.constraints.base import Vocabulary
from decoding.structures import Compiler
from deployments.faults import respell
from deployments.openai_format import ChatFormat
from deployments.response_format import format_of
from deployments.schemas import chat_job
from deployments.tools import CallReader, ToolChatFormat
from pool.text import TextTokenizer
from tests.constrained import byte_compiler, fits
from training.random_models import byte_tokenizer
from turnout.calls import READ, ChatMessage, Chunk
from turnout.errors import TurnoutError
from turnout.structure import Structure
from turnout.tool_formats import tool_format, tool_formats
from turnout.tool_formats.grammar import CallRules
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
MARK, END_MARK = "<tool_call>\n", "\n</tool_call>"
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
    return in_format(call.sampling.structure)


def in_format(structure: Structure | None, name: str = "plain_json") -> Structure | None:
    """As a pool of this format has it."""
    if structure is None or structure.kind != "tools":
        return structure
    return CallRules.of(structure).in_format(tool_format(name)).structure


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
    named = structure(tool_choice={"type": "function", "function": {"name": "now"}})
    assert named is not None
    assert not fits(byte_compiler(), named, CALL)
    assert fits(byte_compiler(), named, '{"name": "now", "arguments": {}}')
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
    made = in_format(made)
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
    made = in_format(made)
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
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "x"}]}}},
            "tool_choice.allowed_tools.tools.0.name",
        ),
        ({"decoding": {"structure": {"kind": "tools", "value": "{}"}}}, "decoding.structure"),
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
    form = ToolChatFormat(ChatFormat(), CallReader())
    made = form.choice(Chunk(0, "See.\n" + MARK + CALL + END_MARK, (), FinishReason.STOP), False)
    [call] = made["message"]["tool_calls"]
    assert made["finish_reason"] == "tool_calls"
    assert made["message"]["content"] == "See.\n"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    cut = form.choice(Chunk(0, CALL[:20], (), FinishReason.LENGTH), False)
    assert (cut["message"]["content"], cut["finish_reason"]) == (CALL[:20], "length")
    text = form.choice(Chunk(0, "Warm.", (), FinishReason.STOP), False)
    assert (text["message"]["content"], text["finish_reason"]) == ("Warm.", "stop")


def test_one_form_for_what_a_body_asks_for() -> None:
    """Of the endpoint and of batch lines: calls are read out, and tokens told."""
    job = chat_job({"messages": [USER], "tools": TOOLS, "decoding": {"tokens": True}})
    made = format_of(ChatFormat(), job.calls[0]).choice(Chunk(0, CALL, (), FinishReason.STOP), False)
    assert made["finish_reason"] == "tool_calls"
    assert made["turnout"] == {"tokens": []}
    plain = chat_job({"messages": [USER], "tools": TOOLS, "tool_choice": "none"})
    assert isinstance(format_of(ChatFormat(), plain.calls[0]), ChatFormat)


def test_a_template_without_a_place_for_tools_gets_them_as_text(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer, tool = TextTokenizer(tmp_path), Tool("weather", "of a city", json.dumps(WEATHER))
    turns = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Warm?"),
        ChatMessage("assistant", "See.", (ToolCall("a", "weather", '{"city": "Bern"}'),)),
        ChatMessage("tool", "yes", (), "a"),
        ChatMessage("user", "And?"),
    ]
    text = tokenizer.decode(tokenizer.encode_chat(turns, [tool]), special=True)
    written = tokenizer.tools.form.written(turns[2].tool_calls)
    system, rest = text.split("<|user|>", 1)
    assert system.startswith("<|system|>Be brief.\n\nYou may call functions")
    assert json.dumps(WEATHER) in system
    result = "<tool_response>\nyes\n</tool_response>\nAnd?"
    assert rest == f"Warm?<|assistant|>See.\n{written}<|end|><|user|>{result}<|assistant|>"


def test_a_template_that_knows_no_system_gets_tools_in_the_first_message(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    plain.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    plain.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    text = tokenizer.decode(tokenizer.encode_chat([ChatMessage("user", "Warm?")], [Tool("weather")]))
    assert text.startswith("[user]You may call functions")
    assert text.endswith("Warm?")


def test_a_template_with_a_place_for_tools_is_filled_in(tmp_path: Path) -> None:
    """Also where it wants arguments as text, and ids of nine characters."""
    plain = byte_tokenizer()
    template = (
        "{%% for tool in tools or [] %%}{{ tool.function.name }};{%% endfor %%}"
        "{%% for m in messages %%}[{{ m.role }}]{{ m.content }}"
        "{%% for c in m.tool_calls or [] %%}{{ c.function.name }}=%s{%% if c.id|length != 9 and %s %%}"
        "{{ raise_exception('id') }}{%% endif %%}{%% endfor %%}{{ m.tool_call_id or '' }}{%% endfor %%}"
    )
    turns = [
        ChatMessage("user", "x"),
        ChatMessage("assistant", "", (ToolCall("c1", "weather", '{"city": "Bern"}'),)),
        ChatMessage("tool", "warm", (), "c1"),
    ]
    ids = {}
    for name, arguments, short in (
        ("values", "{{ c.function.arguments.items()|list }}", "false"),
        ("text", "{{ '' + c.function.arguments }}", "true"),
    ):
        plain.chat_template = template % (arguments, short)
        plain.save_pretrained(tmp_path / name)
        tokenizer = TextTokenizer(tmp_path / name)
        text = tokenizer.decode(tokenizer.encode_chat(turns, [Tool("weather")]))
        begin, ids[name] = text.split("[tool]warm")
        shown = {"values": "[('city', 'Bern')]", "text": '{"city": "Bern"}'}[name]
        assert begin == f"weather;[user]x[assistant]weather={shown}"
    assert ids["values"] == "c1"
    assert len(ids["text"]) == 9
    assert ids["text"].isalnum()


@pytest.mark.parametrize(("name", "special"), [("mistral", True), ("hermes", False)])
def test_markers_that_are_tokens_are_meant_and_shown(name: str, special: bool, tmp_path: Path) -> None:
    """Flagged as special or not: the library allows such tokens only where a grammar names them."""
    form, made = tool_format(name), byte_tokenizer()
    marks = [AddedToken(each, special=special, normalized=False) for each in form.tokens]
    made.add_tokens(marks, special_tokens=special)
    made.add_tokens([AddedToken("now", special=True)], special_tokens=True)
    made.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.tools.form is form
    before, after = form.written([ToolCall("", "now", "{}")]).split("now")
    spelled = [made.convert_tokens_to_ids(letter) for letter in "now"]
    ids = made.encode(before, add_special_tokens=False) + spelled + made.encode(after, add_special_tokens=False)
    assert tokenizer.vocabulary()[form.tokens[0]] == ids[0]
    structure = in_format(CallRules({"now": {"type": "object", "additionalProperties": False}}).structure, name)
    assert structure is not None
    assert tokenizer._bytes is not None
    definition = tokenizer._bytes.for_structures()
    assert definition is not None
    compiler = Compiler(Vocabulary(definition, tokenizer.eos_ids))
    constraint = compiler.compile(structure)
    assert constraint.clone().accepts(ids)
    assert not constraint.clone().accepts([ids[0], *made.encode("Hi", add_special_tokens=False)])
    detokenizer = tokenizer.detokenizer([1], shown=tokenizer.tools.shown(name))
    text = "".join(map(detokenizer.feed, ids))
    [call] = CallReader().whole(Chunk(0, text, (), FinishReason.STOP, tool_format=name)).tool_calls
    assert (call.name, call.arguments) == ("now", "{}")


@pytest.mark.parametrize("name", sorted(tool_formats()))
def test_marks_that_are_special_tokens_are_allowed_shown_and_read(name: str, tmp_path: Path) -> None:
    """Whichever of a format's marks a vocabulary flags as special."""
    form, made = tool_format(name), byte_tokenizer()
    call = ToolCall("", "f", '{"a": "x </b> y"}')
    written = [each.written([call]) for each in form.syntaxes]
    marks = re.findall(r"<[^ <>=]+>|\[[A-Z_]+\]|\uff5cDSML\uff5c", "".join(written).replace("</b>", ""))
    marks = [each for each in marks if each == "\uff5cDSML\uff5c" or "DSML" not in each]
    made.add_tokens([AddedToken(each, special=True) for each in dict.fromkeys(marks)], special_tokens=True)
    made.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    definition = tokenizer._bytes.for_structures() if tokenizer._bytes is not None else None
    assert definition is not None
    compiler = Compiler(Vocabulary(definition, tokenizer.eos_ids))
    for text in written:
        for required in (False, True):
            said = "So <b>:\n" * (not required and name != "harmony" and not text.startswith("{"))
            structure = in_format(CallRules({"f": schema}, required).structure, name)
            assert structure is not None
            ids = made.encode(said + text, add_special_tokens=False)
            assert compiler.compile(structure).accepts(ids), (said, text)
            detokenizer = tokenizer.detokenizer([1], shown=tokenizer.tools.shown(name))
            shown = "".join([*map(detokenizer.feed, ids), detokenizer.flush()])
            reader = CallReader({"f": schema})
            read = reader.whole(Chunk(0, shown, (), FinishReason.STOP, tool_format=name))
            assert read.text == said
            assert [(each.name, each.arguments) for each in read.tool_calls] == [("f", call.arguments)]


def test_calls_that_a_server_elsewhere_cut_are_text() -> None:
    calls = (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "f", '{"x": '), ToolCall("c", "f", "[1]"))
    read = CallReader().whole(Chunk(0, "so ", (), FinishReason.LENGTH, calls, tool_format=READ))
    assert (read.text, read.tool_calls, read.finish_reason) == ('so {"x": [1]', calls[:1], FinishReason.LENGTH)
