"""Thinking and calls of any text: nothing raises, nothing is lost, and a stream in any pieces is the whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.thinking import Channels, Marker, Part, Start, Thinking
from deployments.tools import CallReader
from pool.reasoning import PAIRS
from turnout.calls import Chunk
from turnout.tool_formats import tool_format, tool_formats
from turnout.tools import ToolCall
from turnout.types import FinishReason

CALLS = [ToolCall("", "weather", '{"city": "Bern"}'), ToolCall("", "now", "{}")]
COUNTED = "\u2603"  # stands in no syntax, and is escaped by nothing
FRAGMENTS = [COUNTED, *'{}[]",:<>|\n ', "1", "true", '{"a": ', "\\u00", "\u00e9", "\U0001f600", "\u0301", "\n\n", "to="]
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
STARTS: tuple[Start, ...] = ("open", "inside", "closed")
Fed = tuple[int, str, str]  # token, text, name of a special one


def split(thinking: Thinking, fed: Sequence[Fed]) -> list[tuple[Part, str]]:
    splitter = thinking.splitter()
    return [piece for each in fed for piece in splitter.feed(*each)] + splitter.flush()


def parts(pieces: Sequence[tuple[Part, str]]) -> dict[Part, str]:
    return {part: "".join(text for each, text in pieces if each is part) for part in Part}


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({each % (len(text) + 1) for each in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def check_calls(form: str, pieces: Sequence[tuple[Part, str]], text: str) -> None:
    """Whole and as it comes, an answer has the same calls, and every counted character."""
    found = parts(pieces)
    chunk = Chunk(0, found[Part.TEXT], (), FinishReason.STOP, tool_format=form, reasoning=found[Part.REASONING])
    read, reader = CallReader().whole(chunk), CallReader()
    chunks = []
    for part, piece in pieces:
        said, thought = piece if part is Part.TEXT else "", piece if part is Part.REASONING else ""
        chunks.append(reader.part(Chunk(0, said, (), tool_format=form, reasoning=thought)))
    chunks.append(reader.part(Chunk(0, "", (), FinishReason.STOP, tool_format=form)))
    calls = [(call.name, call.arguments) for call in read.tool_calls]
    assert [(call.name, call.arguments) for call in chunks[-1].tool_calls] == calls
    markers = found[Part.MARKER].count(COUNTED)
    given = [read.text, read.reasoning, *(arguments for _, arguments in calls)]
    assert sum(each.count(COUNTED) for each in given) + markers == text.count(COUNTED)
    came = [chunk.text + chunk.reasoning + "".join(part.arguments for part in chunk.call_parts) for chunk in chunks]
    assert sum(each.count(COUNTED) for each in came) + markers == text.count(COUNTED)


def woven(form: str, markers: Sequence[str]) -> st.SearchStrategy[list[str]]:
    """Pieces of texts that markers, parts of them, calls and parts of those stand in."""
    own = [each.written(CALLS) for each in tool_format(form).syntaxes]
    own += [piece for each in own for piece in re.split(r"(?<=[>{:,\]\n])", each)]
    partial = [each[:size] for each in markers for size in range(1, len(each) + 1)]
    return st.lists(
        st.sampled_from([*FRAGMENTS, *markers]) | st.sampled_from(partial) | st.sampled_from(own) | st.text(max_size=4),
        max_size=20,
    )


@pytest.mark.parametrize("form", sorted(set(tool_formats()) - {"harmony"}))
@settings(max_examples=15)
@given(data=st.data(), start=st.sampled_from(STARTS), cuts=st.lists(st.integers(0, 400), max_size=25))
def test_markers_that_are_text(form: str, data: st.DataObject, start: Start, cuts: list[int]) -> None:
    begin, end = data.draw(st.sampled_from(PAIRS))
    thinking = Thinking(Marker(begin, ()), Marker(end, ()), start=start)
    text = "".join(data.draw(woven(form, (begin, end))))
    pieces = split(thinking, [(-1, piece, "") for piece in cut(text, cuts)])
    assert "".join(piece for _, piece in pieces) == text
    assert parts(pieces) == parts(split(thinking, [(-1, text, "")]))
    check_calls(form, pieces, text)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm4", "plain_json"])
@settings(max_examples=15)
@given(data=st.data(), start=st.sampled_from(STARTS), cuts=st.lists(st.integers(0, 40), max_size=25))
def test_markers_that_are_tokens(form: str, data: st.DataObject, start: Start, cuts: list[int]) -> None:
    thinking = Thinking(Marker("<think>", (1,), 1), Marker("</think>", (2,), 2), start=start)
    written = data.draw(woven(form, ("<think>", "</think>")))
    tokens = {"<think>": 1, "</think>": 2}

    def fed(pieces: Sequence[str]) -> list[Fed]:
        return [(tokens.get(piece, -1), piece, "") for piece in pieces]

    finer = [part for piece in written for part in ([piece] if piece in tokens else cut(piece, cuts))]
    pieces = split(thinking, fed(finer))
    assert "".join(piece for _, piece in pieces) == "".join(written)
    assert parts(pieces) == parts(split(thinking, fed(written)))
    check_calls(form, pieces, "".join(written))


@settings(max_examples=40)
@given(data=st.data(), start=st.sampled_from(STARTS), cuts=st.lists(st.integers(0, 40), max_size=25))
def test_channels_of_harmony(data: st.DataObject, start: Start, cuts: list[int]) -> None:
    ids = {name: place for place, name in enumerate(HARMONY)}
    channels = Channels(ids["<|start|>"], ids["<|channel|>"], ids["<|message|>"], frozenset((3, 4, 5)))
    thinking = Thinking(Marker("", ()), Marker("", ()), channels, start=start)
    words = st.sampled_from(
        [*FRAGMENTS, *HARMONY, "assistant", "analysis", "final", "commentary", " to=functions.now", "json"]
    )
    written = data.draw(
        st.lists(words | st.sampled_from(re.split(r"(<\|.*?\|>)", tool_format("harmony").written(CALLS))), max_size=25)
    )

    def fed(pieces: Sequence[str]) -> list[Fed]:
        return [(ids[piece], "", piece) if piece in ids else (-1, piece, "") for piece in pieces]

    finer = [part for piece in written for part in ([piece] if piece in ids else cut(piece, cuts))]
    pieces = split(thinking, fed(finer))
    assert "".join(piece for _, piece in pieces) == "".join(written)
    check_calls("harmony", pieces, "".join(written))
