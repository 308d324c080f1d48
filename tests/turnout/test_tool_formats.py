"""Tool formats: what is written is read again, in any pieces; what is no call is never lost; grammars hold to both."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.tools import CallReader
from tests.constrained import byte_compiler, fits
from turnout.calls import Chunk
from turnout.structure import Structure
from turnout.tool_formats import recognised, tool_format, tool_formats
from turnout.tool_formats.base import JSON, MARKED
from turnout.tool_formats.grammar import CallRules
from turnout.tool_formats.json_scanner import JsonScanner
from turnout.tool_formats.parser import NO_FUNCTIONS, CallParser, Said
from turnout.tool_formats.schemas import kind_of, kinds_of, parameters_of
from turnout.tools import ToolCall
from turnout.types import FinishReason

NAMES = sorted(tool_formats())
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"weather": CITY, "now": {"type": "object", "additionalProperties": False}}
CALLS = [ToolCall("", "weather", '{"city": "Bern"}'), ToolCall("", "now", "{}")]


def objects(names: st.SearchStrategy[str]) -> tuple[st.SearchStrategy[Any], st.SearchStrategy[str]]:
    """Values, and arguments, whose members have some names."""
    values: st.SearchStrategy[Any] = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=8,
    )
    return values, st.dictionaries(names, values, max_size=3).map(lambda each: json.dumps(each, ensure_ascii=False))


VALUES, ARGUMENTS = objects(st.text())
# Formats that quote no names have only such.
PLAIN_ARGUMENTS = objects(st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,9}", fullmatch=True))[1]
REASON = FinishReason.STOP


def calls_of(name: str) -> list[ToolCall]:
    return CALLS[:1] if tool_format(name).single else CALLS


def as_json(name: str) -> bool:
    """Whether the format has arguments as JSON."""
    return tool_format(name).syntaxes[0].arguments is JSON


def schema_of(arguments: str) -> dict[str, Any]:
    """A schema that says of each argument what it is."""
    members = {key: {"type": kind_of(value)} for key, value in json.loads(arguments).items()}
    return {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": members}}}


def values_of(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def whole(name: str, text: str, functions: Mapping[str, Any] = NO_FUNCTIONS) -> Chunk:
    return CallReader(functions).whole(Chunk(0, text, (), REASON, tool_format=name))


def streamed(name: str, text: str, cuts: list[int], functions: Mapping[str, Any] = NO_FUNCTIONS) -> list[Chunk]:
    """An answer read in pieces that end at some characters."""
    reader, ends = CallReader(functions), [*sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    chunks = [reader.part(Chunk(0, piece, (), tool_format=name)) for piece in pieces[:-1]]
    return [*chunks, reader.part(Chunk(0, pieces[-1], (), REASON, tool_format=name))]


def joined(chunks: list[Chunk]) -> list[tuple[str, str]]:
    """Name and arguments of each call of a stream, from its parts."""
    made: list[tuple[str, str]] = []
    ids: list[str] = []
    for part in (part for chunk in chunks for part in chunk.call_parts):
        if part.index == len(made):
            assert part.id
            assert part.name
            made.append((part.name, ""))
            ids.append(part.id)
        else:
            assert not part.id
            assert not part.name
        assert part.index == len(made) - 1
        made[-1] = (made[-1][0], made[-1][1] + part.arguments)
    ended = [call.id for call in chunks[-1].tool_calls]
    assert [each for each in ids if each in ended] == ended
    return made


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(data=st.data(), cuts=st.lists(st.integers(0, 300), max_size=30))
def test_what_is_written_is_read_in_any_pieces(name: str, data: st.DataObject, cuts: list[int]) -> None:
    form = tool_format(name)
    arguments = data.draw(st.lists(ARGUMENTS if as_json(name) else PLAIN_ARGUMENTS, min_size=1, max_size=3))
    functions = {f"f.{place}": schema_of(each) for place, each in enumerate(arguments)}
    calls = [ToolCall("", f"f.{place}", each) for place, each in enumerate(arguments[: 1 if form.single else 3])]
    text = form.written(calls)
    if form.syntaxes[0].mark:
        text = "Let me {see}.\n" + text
    expected = [(call.name, call.arguments) for call in calls]
    read = whole(name, text, functions)
    found = [(call.name, call.arguments) for call in read.tool_calls]
    assert found == expected if as_json(name) else values_of(found) == values_of(expected)
    assert read.text == ("Let me {see}.\n" if form.syntaxes[0].mark else "")
    chunks = streamed(name, text, cuts, functions)
    assert joined(chunks) == found
    assert "".join(chunk.text for chunk in chunks) == read.text
    assert all((len(call.id) == 9) == form.short_ids for call in read.tool_calls)


@pytest.mark.parametrize("name", [name for name in NAMES if as_json(name)])
def test_arguments_come_as_they_are_written(name: str) -> None:
    """After each character, what has come of the arguments is the beginning of them, and no more than one behind."""
    call = ToolCall("", "weather", '{"city": "Bern", "days": [1, 2]}')
    text = tool_format(name).written([call])
    start = text.index(call.arguments)
    chunks = streamed(name, text, list(range(len(text))))
    so_far = ""
    for place, chunk in enumerate(chunks):
        so_far += "".join(part.arguments for part in chunk.call_parts)
        assert so_far == text[start : place + 1][: len(call.arguments)]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_among_arguments_comes_character_by_character(name: str) -> None:
    text = "\n".join(["a long text"] * 8)
    call = ToolCall("", "weather", json.dumps({"city": text}))
    written = tool_format(name).written([call])
    functions = {"weather": {"properties": {"city": {"type": "string"}}}}
    chunks = streamed(name, written, list(range(len(written))), functions)
    [(_, arguments)] = joined(chunks)
    assert json.loads(arguments) == {"city": text}
    assert sum(sum(len(part.arguments) for part in chunk.call_parts) > 8 for chunk in chunks) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_no_character_is_lost_of_what_is_no_call(name: str) -> None:
    """Mutated texts: pieces give what the whole gives, and all that is in no call, nor written around one, is said."""
    draw, form = random.Random(7), tool_format(name)
    original = "So {a}: " * bool(form.syntaxes[0].mark) + form.written(calls_of(name))
    pieces = ["{", "}", '"', "\\", "<", ",", "é", "\n", " ", *form.special, *(each.mark for each in form.syntaxes)]
    for _ in range(120):
        text = original
        for _ in range(draw.randrange(1, 4)):
            at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
            end = min(end, at + draw.randrange(6))
            text = text[:at] + draw.choice([*pieces, text[at:end] * 2, ""]) + text[end:]
        read = whole(name, text)
        chunks = streamed(name, text, [draw.randrange(len(text) + 1) for _ in range(draw.randrange(20))])
        assert [(each.name, each.arguments) for each in chunks[-1].tool_calls] == [
            (each.name, each.arguments) for each in read.tool_calls
        ]
        for call in read.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
        given = "".join(chunk.text for chunk in chunks) + "".join(arguments for _, arguments in joined(chunks))
        if as_json(name):
            assert len(given) <= len(read.text) + sum(len(each.arguments) for each in read.tool_calls)
        if not read.tool_calls and form.markup is None:
            assert read.text == text


COUNTED = "\u2603"  # stands in no syntax, and is escaped by nothing
PIECES = [COUNTED, *'{}[]",:<\\\n 1', "None", "f", '"a": ', "a:", "<parameter=a>\n", "<|channel|>analysis<|message|>"]


def counted(texts: Iterable[str]) -> int:
    return sum(text.count(COUNTED) for text in texts)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data(), cuts=st.lists(st.integers(0, 300), max_size=30))
def test_of_any_text_each_character_is_said_or_in_a_call(name: str, data: st.DataObject, cuts: list[int]) -> None:
    form = tool_format(name)
    own = [each.written(CALLS) for each in form.syntaxes]
    own += [piece for each in own for piece in re.split(r"(?<=[>{:,\]\n])", each)]
    pieces = st.sampled_from([*PIECES, *form.special]) | st.sampled_from(own) | st.text(max_size=5)
    text = "".join(data.draw(st.lists(pieces, max_size=25)))
    read, chunks = whole(name, text, FUNCTIONS), streamed(name, text, cuts, FUNCTIONS)
    calls = [(call.name, call.arguments) for call in read.tool_calls]
    assert counted([read.text, read.reasoning, *(arguments for _, arguments in calls)]) == counted([text])
    given = [chunk.text + chunk.reasoning for chunk in chunks] + [arguments for _, arguments in joined(chunks)]
    assert counted(given) == counted([text])
    assert [(call.name, call.arguments) for call in chunks[-1].tool_calls] == calls
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


class CountedMarkup:
    """An expression that counts the characters it is given to search."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.searched = 0

    def search(self, text: str, partial: bool) -> Any:
        self.searched += len(text)
        return self._inner.search(text, partial=partial)


@pytest.mark.parametrize("name", ["command_r", "harmony"])
def test_a_text_twice_as_long_is_searched_for_twice_as_long(name: str) -> None:
    searched = []
    for times in (2000, 4000):
        form = tool_format(name)
        markup = CountedMarkup(form.markup)
        text = f"a{form.special[-1]}" * times
        events = CallParser(replace(form, markup=markup)).feed(text, final=True)
        assert "".join(each.text for each in events if isinstance(each, Said)) == "a" * times
        searched.append(markup.searched)
    assert searched[1] < 2.5 * searched[0]


def test_a_stream_that_is_cut_gives_the_beginning_of_a_value_as_text() -> None:
    text = tool_format("qwen3_coder").written([ToolCall("", "f", '{"days": 34}')])
    functions = {"f": {"properties": {"days": {"type": "integer"}}}}
    for size in range(len("34")):
        chunks = streamed("qwen3_coder", text[: text.index("34") + size], list(range(len(text))), functions)
        assert joined(chunks) == [("f", '{"days": ')]
        assert "".join(chunk.text for chunk in chunks) == "34"[:size]


def test_schemas_that_name_each_other_again_and_again_are_looked_at_for_a_while_only() -> None:
    for keyword in ("anyOf", "allOf"):
        each = {f"a{place}": {keyword: [{"$ref": f"#/$defs/a{place + 1}"}] * 2} for place in range(40)}
        root = {"$ref": "#/$defs/a0", "$defs": {**each, "a40": {"type": "string"}}}
        assert "string" in kinds_of(root, root)
        assert parameters_of(root, root).named == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_cut_is_text_of_a_whole_answer(name: str) -> None:
    text = tool_format(name).written(CALLS[:1])
    cut = text[: text.index("Bern")]
    assert (whole(name, cut).text, whole(name, cut).tool_calls) == (cut, ())


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_grammar_holds_to_the_format(name: str, required: bool, parallel: bool) -> None:
    form = tool_format(name)
    rules = CallRules(FUNCTIONS, required, parallel).in_format(form)
    text = form.written(CALLS[:1])
    assert fits(byte_compiler(), rules.structure, text)
    assert fits(byte_compiler(), rules.structure, form.written(CALLS)) == (parallel and not form.single) or form.single
    assert fits(byte_compiler(), rules.structure, "It is warm.") != required
    # Without special tokens harmony's channels are words like others.
    assert not fits(byte_compiler(), rules.structure, text.replace("Bern", "Rome")) or (form.single and not required)


ANSWERS = [
    ({"json_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}, True),
    ({"json_object": True}, True),
    ({"regex": r"\{.*/.*\}"}, True),
    ({"choice": ['{"name": "a/b"}', "no"]}, True),
    ({"grammar": 'start: "{" REST\nREST: /.+/'}, True),
    ({"span": '}\n%json {"x" /a"/ \\ {"name": "a/b"} \x7f %lark { start: "a'}, True),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("answer", "fitting"), ANSWERS)
def test_an_answer_calls_or_fits_what_it_is_to_fit(name: str, answer: dict[str, Any], fitting: bool) -> None:
    rules = CallRules(FUNCTIONS, answer=Structure.model_validate(answer)).in_format(tool_format(name))
    form, text = tool_format(rules.form), '{"name": "a/b"}'
    assert fits(byte_compiler(), rules.structure, text) == fitting
    assert fits(byte_compiler(), rules.structure, form.written(CALLS[:1]))
    assert not fits(byte_compiler(), rules.structure, "It is warm.")
    assert (whole(rules.form, text).text, whole(rules.form, text).tool_calls) == (text, ())


def test_beside_json_answers_only_marked_calls_are_calls() -> None:
    bare = '{"name": "weather", "arguments": {"city": "Bern"}}'
    assert whole("plain_json", bare).tool_calls
    assert whole("plain_json" + MARKED, bare).text == bare


HARMONY_CALLS = [
    '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>',
    ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    ' to=functions.now<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>',
]


@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"])
@pytest.mark.parametrize("call", HARMONY_CALLS)
def test_a_recipient_stands_behind_or_before_its_channel(call: str, before: str) -> None:
    for chunks in ([whole("harmony", before + call)], streamed("harmony", before + call, list(range(200)))):
        assert "".join(chunk.text for chunk in chunks) == ""
        assert [(each.name, each.arguments) for each in chunks[-1].tool_calls] == [("now", '{"a": 1}')]


def test_channels_of_harmony_are_thinking_and_text() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    for chunks in ([whole("harmony", text)], streamed("harmony", text, list(range(len(text))))):
        assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
        assert "".join(chunk.text for chunk in chunks) == "One moment."
        assert [(each.name, each.arguments) for each in chunks[-1].tool_calls] == [("now", '{"a": 1}')]


V3 = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
)


@pytest.mark.parametrize(
    ("template", "vocabulary", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args>}</tool_call>', (), "hermes"),
        ("[TOOL_CALLS] {{ calls }}", (), "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", (), "mistral_args"),
        ("{{ message.content }}", ("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
        ("{{ message.content }}", ("[TOOL_CALLS]",), "mistral"),
        ("{{ message.content }}", ("<|python_tag|>",), "llama3_json"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>x<\uff5ctool\u2581sep\uff5c>```json", (), "deepseek_v3"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>x<\uff5ctool\u2581sep\uff5c>", (), "deepseek_v31"),
        ("to=functions.{{ name }}<|channel|>commentary", (), "harmony"),
        ("", ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"), "harmony"),
        ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", ("<tool_call>", "</tool_call>"), "qwen3_coder"),
        ("<start_function_call>call:{{ name }}<escape>", (), "function_gemma"),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>", ("<tool_call>", "</tool_call>"), "glm4"),
        ("", ("<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"), "glm4"),
        ("{{ a }}", V3, "deepseek_v3"),
        ("{{ a }}", (*V3, "\uff5cDSML\uff5c"), "deepseek_v32"),
        ("{{ tools }}", ("a",), "plain_json"),
    ],
)
def test_a_format_is_recognised(template: str, vocabulary: tuple[str, ...], name: str) -> None:
    assert recognised(template, vocabulary).name == name


@given(value=VALUES, indent=st.sampled_from([None, 1]), escaped=st.booleans(), cut=st.integers(0, 50))
def test_a_scanner_finds_the_end_of_a_value(value: Any, indent: int | None, escaped: bool, cut: int) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=escaped)
    scanner = JsonScanner()
    taken = scanner.feed(text[:cut])
    taken += scanner.feed(text[cut:] + ' {"more"')
    assert (taken, scanner.done, scanner.failed) == (len(text), True, False)


@pytest.mark.parametrize(
    "text", ["{a", '{"a" 1', '{"a": 01}', '{"a": 1,}', "[1 2]", "[tru]", '["\\x"]', '["\\u12g4"]', "[\n}"]
)
def test_a_scanner_refuses_what_json_does(text: str) -> None:
    scanner = JsonScanner()
    scanner.feed(text)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert scanner.failed
