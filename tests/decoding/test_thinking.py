"""Thinking in token streams: split, counted, ended by a budget, and followed by a structure, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.constraints.base import ANY
from decoding.fakes import TableModel, pair
from decoding.model import Request
from decoding.sequence import Sequence
from decoding.thinking import Channels, Marker, Part, Thinking, ThinkingWalk
from decoding.thinking_constraint import ThinkingConstraint
from tests.constrained import CHARS, END, char_compiler, ids_in
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import FinishReason, SamplingParams

# The vocabulary of `char_compiler`: 0 pads, 1 ends, then a token for each character.
ID = {char: place for place, char in enumerate(CHARS, 2)}
VOCAB = 2 + len(CHARS)


class Characters:
    """Texts of `char_compiler`'s tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(CHARS[each - 2] for each in ids if each > END)

    def token_bytes(self, token_id: int) -> bytes:
        return CHARS[token_id - 2].encode() if token_id > END else b""

    def special_name(self, token_id: int) -> str:
        return "" if token_id > END else "<end>"


TOKENS = Characters()


def marker(text: str, token: bool = False) -> Marker:
    ids = tuple(ID[char] for char in text)
    return Marker(text, ids, ids[0] if token else None)


def by_token(**options: Any) -> Thinking:
    return Thinking(marker(";", True), marker(",", True), **options)


def by_text(**options: Any) -> Thinking:
    return Thinking(marker("xyx"), marker("zzy"), **options)


def ids(text: str) -> list[int]:
    return [END if char == "$" else ID[char] for char in text]


def split(thinking: Thinking, texts: Iterable[tuple[int, str]]) -> dict[Part, str]:
    found: dict[Part, str] = dict.fromkeys(Part, "")
    splitter = thinking.splitter()
    for token, text in texts:
        for part, piece in splitter.feed(token, text):
            found[part] += piece
    for part, piece in splitter.flush():
        found[part] += piece
    return found


def parts(thinking: Thinking, text: str) -> tuple[str, str]:
    found = split(thinking, [(ID.get(char, -1), char) for char in text])
    assert sum(map(len, found.values())) == len(text)
    return found[Part.REASONING], found[Part.TEXT]


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (by_token(), ";\nabc\n\n,\n\nhello", ("abc", "hello")),
        (by_token(), "\n ;abc,hello;a,b", ("abc", "hello;a,b")),
        (by_token(), " hello;abc,", ("", " hello;abc,")),
        (by_token(), ";abc\nd", ("abc\nd", "")),
        (by_token(), ";abc\n\n", ("abc\n\n", "")),
        (by_token(start="inside"), "\nabc\nd,e", ("abc\nd", "e")),
        (by_token(start="closed"), "abc,e", ("", "abc,e")),
        (by_token(strips=False), ";a,\nb", ("a", "\nb")),
        (by_token(), ";,a", ("", "a")),
        (by_token(), "  ", ("", "  ")),
        (by_text(), "xyxabc\nzzyhello", ("abc", "hello")),
        (by_text(), "xyxazzzyb", ("az", "b")),
        (by_text(), "xyxazz", ("azz", "")),
        (by_text(), "xyab", ("", "xyab")),
        (by_text(), "xy", ("", "xy")),
    ],
)
def test_thinking_is_what_stands_between_the_markers(thinking: Thinking, text: str, expected: tuple[str, str]) -> None:
    assert parts(thinking, text) == expected
    if all(char in ID for char in text):
        walk = ThinkingWalk(thinking, TOKENS)
        flags = [walk.feed(token) for token in ids(text)]
        assert walk.num_reasoning == sum(flags)
        assert walk.num_thought <= walk.num_reasoning


@given(
    text=st.lists(st.sampled_from(["xyx", "zzy", ";", ",", "\n", " ", "x", "y", "z", "ab", "xy", "zz"])).map("".join),
    cuts=st.lists(st.integers(1, 4)),
    inside=st.booleans(),
    tokens=st.booleans(),
)
def test_no_character_is_lost_however_the_text_is_cut(text: str, cuts: list[int], inside: bool, tokens: bool) -> None:
    thinking = (by_token if tokens else by_text)(start="inside" if inside else "open")
    pieces, rest = [], text
    for cut in [*cuts, *([1] * len(text))]:
        pieces, rest = [*pieces, rest[:cut]], rest[cut:]
    splitter = thinking.splitter()
    found = [each for piece in pieces for each in splitter.feed(ID.get(piece, -1), piece)] + splitter.flush()
    assert "".join(piece for _, piece in found) == text
    if not tokens:  # of texts, how they are cut changes nothing
        joined = split(thinking, [(-1, text)])
        assert {part: "".join(piece for each, piece in found if each is part) for part in Part} == joined


NAMES = {100: "<|start|>", 101: "<|channel|>", 102: "<|message|>", 103: "<|end|>", 104: "<|return|>", 105: "<|call|>"}
WORDS = ["assistant", "analysis", "final", "commentary", " to=functions.f", "{}", "Hi", "\n", " "]
HARMONY = Thinking(
    Marker("", (101, 1, 102)),
    Marker("", (103, 100, 0, 101, 2, 102)),
    Channels(100, 101, 102, frozenset({103, 104, 105})),
)


def harmony(stream: list[int]) -> list[tuple[Part, str]]:
    splitter = HARMONY.splitter()
    found = []
    for token in stream:
        name = NAMES.get(token, "")
        found += splitter.feed(token, "" if name else WORDS[token], name)
    return found + splitter.flush()


def joined(found: list[tuple[Part, str]], part: Part) -> str:
    return "".join(piece for each, piece in found if each is part)


@pytest.mark.parametrize(
    ("stream", "reasoning", "text"),
    [
        ([101, 1, 102, 6, 6, 103, 100, 0, 101, 2, 102, 6, 104], "HiHi", "Hi"),
        ([101, 2, 102, 6], "", "Hi"),
        ([101, 1, 102, 6, 103, 100, 0, 101, 1, 102, 7, 103], "Hi\n", ""),
        ([101, 3, 102, 6, 103, 100, 0, 101, 2, 102, 6], "", "HiHi"),
        (
            [101, 1, 102, 6, 103, 100, 0, 101, 3, 4, 102, 5, 105],
            "Hi",
            "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        ),
        ([6, 8, 6], "", "Hi Hi"),
    ],
)
def test_channels_are_told_apart_and_calls_stay_as_they_are(stream: list[int], reasoning: str, text: str) -> None:
    found = harmony(stream)
    assert (joined(found, Part.REASONING), joined(found, Part.TEXT)) == (reasoning, text)


@given(stream=st.lists(st.sampled_from([*NAMES, *range(len(WORDS))]), max_size=24))
def test_no_character_of_channels_is_lost(stream: list[int]) -> None:
    written = "".join(NAMES[token] if token in NAMES else WORDS[token] for token in stream)
    assert "".join(piece for _, piece in harmony(stream)) == written


# Structures and budgets


def constraint(thinking: Thinking, regex: str = "") -> ThinkingConstraint:
    inner = char_compiler().compile(Structure(kind="regex", value=regex)).clone() if regex else None
    return ThinkingConstraint(thinking, TOKENS, inner, frozenset({END}), VOCAB)


def allowed(made: ThinkingConstraint, answer: str, *paths: str) -> list[str]:
    """Characters that may follow each path; * for all but the end, ** for all."""
    shown = []
    for mask in made.masks(ids(answer), [tuple(ids(path)) for path in paths]):
        found = ids_in(mask) or []
        chars = "".join("$" if each == END else CHARS[each - 2] for each in found if each in range(1, VOCAB))
        shown.append("**" if mask is ANY else "*" if chars == CHARS else chars)
    return shown


def test_a_structure_begins_after_the_end_of_thinking_also_within_a_draft() -> None:
    made = constraint(by_token(), "[ab][01]")
    assert allowed(made, "", "", ";", ";c", ";c,", ";c,a", ";c,a0", "b") == ["ab;", "*", "*", "ab", "01", "$", "01"]
    assert allowed(made, ";c", "", "dd,", "dd,b", "dd,b1") == ["*", "ab", "01", "$"]
    assert allowed(made, ";c,", "", "a", "a1") == ["ab", "01", "$"]
    assert allowed(made, ";c,a", "", "1") == ["01", "$"]
    assert allowed(made, "a", "", "1") == ["01", "$"]
    assert [made.accepts(ids(text)) for text in (";c,a1", "a1", ";c", ";c,a", ";a1")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_prompt_inside_or_after_thinking_begins_so() -> None:
    assert allowed(constraint(by_token(start="inside"), "a"), "", "", "a,", "a,a") == ["*", "a", "$"]
    assert allowed(constraint(by_token(start="closed"), "a"), "", "", "a") == ["a", "$"]


def test_the_blank_lines_of_the_template_may_stand_before_the_structure() -> None:
    made = constraint(by_token(start="inside", gap=tuple(ids("99"))), "[ab]")
    assert allowed(made, "c,", "", "9", "99", "a", "99a") == ["ab9", "9", "ab", "$", "$"]
    assert made.accepts(ids("c,99a"))
    assert made.accepts(ids("c,a"))


def test_no_token_stands_astride_an_end_that_is_text() -> None:
    made = constraint(by_text(), "[ab]")
    assert allowed(made, "", "", "x", "xy", "xyx", "xyxzz", "xyxzzy", "a") == ["abx", "y", "x", "*", "*", "ab", "$"]


def test_the_budget_leaves_only_the_end_of_thinking() -> None:
    made = constraint(by_token(budget=2))
    assert allowed(made, "", "", ";", ";a", ";ab", ";ab,", "ab") == ["**", "**", "**", ",", "**", "**"]
    assert allowed(constraint(by_token(budget=0, start="inside"), "a"), "", "", ",", ",a") == [",", "a", "$"]
    made = constraint(by_text(budget=1, start="inside"), "a")
    assert allowed(made, "", "", "c", "cz", "czz", "czzy") == ["*", "z", "z", "y", "a"]


def scripted(text: str) -> TableModel:
    """Writes a text, whatever came before, and has a second choice of everything."""
    written = ids(text)

    def next_logits(tokens: list[int]) -> torch.Tensor:
        logits = torch.linspace(0.0, 1.0, VOCAB)
        place = len(tokens) - 1
        logits[written[place] if place < len(written) else END] += 9.0
        return logits

    return TableModel("large", next_logits, VOCAB, 4)


async def written(
    text: str, thinking: Thinking, regex: str, method: str, drafted: str = "", **sampling: Any
) -> Sequence:
    large = scripted(text)
    small = scripted(drafted or text)
    small.name = "small"
    seq = Sequence([0], SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **sampling}), 3, {END})
    seq.thinking = thinking
    seq.constraint = constraint(thinking, regex)
    info = get_method(method)
    params = {"length": "fixed", "draft_length": 6} if method == "speculative" else {}
    async for _ in info.run(Request("r", seq), pair(small, large, TOKENS), info.parse(params)):
        pass
    return seq


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", [";cc,a1", ";cccccccc", "ab,ab,ab"])
async def test_drafts_change_nothing_of_structure_and_budget(drafted: str, temperature: float) -> None:
    """The end of thinking lies inside drafts of six tokens; what follows it there is masked row by row."""
    for thinking in (
        by_token(),
        by_token(budget=2),
        by_token(budget=4, start="inside"),
        by_text(budget=3, start="inside"),
    ):
        for text in (";cc,a1", ";ccccccc", "cc,ddd", "dzzyddd"):
            plain = await written(text, thinking, "[ab][01]", "plain", temperature=temperature)
            other = await written(text, thinking, "[ab][01]", "speculative", drafted, temperature=temperature)
            assert other.tokens == plain.tokens
            if plain.finish_reason is FinishReason.STOP:
                assert plain.constraint is not None
                assert plain.constraint.accepts(plain.answer[:-1])


async def test_planned_answers_come_out_as_by_hand() -> None:
    seq = await written(";cccccc", by_token(budget=3), "[ab][01]", "speculative")
    assert TOKENS.decode(seq.answer) == ";ccc,b1"  # the last of what is allowed is the second choice
    assert seq.finish_reason is FinishReason.STOP
    cut = await written(";cccccc", by_token(), "[ab][01]", "speculative", max_tokens=4)
    assert TOKENS.decode(cut.answer) == ";ccc"
    assert cut.finish_reason is FinishReason.LENGTH
