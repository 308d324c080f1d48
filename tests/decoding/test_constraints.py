"""A constraint is a pure function of the answer's tokens, and what no text fits is refused."""

from __future__ import annotations

import random
import sys
import threading
import time
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.grammars.compiler import GrammarCompiler
from decoding.grammars.flat_schemas import FlatSchema
from decoding.grammars.lark_checks import barren
from decoding.grammars.matcher import GrammarConstraint, agreeing
from decoding.grammars.schemas import endless
from decoding.logits import keep_allowed, process
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.structures import Compiler, check_whole
from tests.constrained import END, allowed_ids, byte_compiler, char_compiler, char_vocabulary, fits
from tests.properties import cases
from turnout.errors import Code, TurnoutError
from turnout.structure import Structure
from turnout.types import SamplingParams, Token

BRANCHING = Structure.model_validate({"regex": "([a-h][0-9]{1,2};)*(x|yy|[k-w]{3})"})
ENDLESS_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


def regex(text: str) -> Structure:
    return Structure(kind="regex", value=text)


def schema(value: Any) -> Structure:
    return Structure.model_validate({"json_schema": value})


def fresh() -> GrammarConstraint:
    return char_compiler().compile(BRANCHING).clone()


Steps = list[tuple[int, int]]
STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10_000)), max_size=40)


def walk(constraint: GrammarConstraint, steps: Steps) -> None:
    """Histories that go on, go back, do not fit, or fork: each answer is as if it were the first one asked for."""
    answer: list[int] = []
    for what, number in steps:
        if what == 0:
            answer = answer[: number % (len(answer) + 1)]
        elif what == 1:
            answer = [*answer, 2 + number % 38]
        elif what == 2:
            constraint = constraint.clone()
        elif what == 3:
            answer = [*answer, END]
        else:
            ids = allowed_ids(fresh(), answer) or [END]
            answer = [*answer, ids[number % len(ids)]]
        cuts = [len(answer), number % (len(answer) + 1), 0]
        for cut in cuts[: 1 + number % 3]:  # the same tokens, of the answer or on a path after it
            assert allowed_ids(constraint, answer[:cut], tuple(answer[cut:])) == allowed_ids(fresh(), answer)
        assert constraint.accepts(answer) == fresh().accepts(answer)


@cases(60)
@given(STEPS)
def test_what_it_says_depends_on_the_tokens_alone(steps: Steps) -> None:
    walk(fresh(), steps)


class Stale(GrammarConstraint):
    """Trusts the number of tokens, and does not look at them."""

    def _turn_to(self, answer: list[int]) -> None:
        self._at = list(answer[: len(self._at)])
        super()._turn_to(answer)


def test_a_stale_state_would_be_seen() -> None:
    made = fresh()
    draw = random.Random(1)
    steps = [(draw.choice((0, 4, 4, 4)), draw.randrange(10_000)) for _ in range(60)]
    walk(made, steps)
    with pytest.raises(AssertionError):
        walk(Stale(made._origin, made.end_ids, made.vocab_size), steps)


def test_threads_ask_the_same_constraint() -> None:
    shared, histories = fresh(), [[], [2, 30], [2, 30, 38], [25], [26, 26], [12, 13, 14]]
    expected = [allowed_ids(fresh(), answer) for answer in histories]
    wrong: list[int] = []

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(200):
            place = draw.randrange(len(histories))
            if allowed_ids(shared, histories[place]) != expected[place]:
                wrong.append(place)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_end_stands_only_where_the_text_is_complete() -> None:
    made = fresh()
    for answer in ([], [2], [2, 30], [2, 30, 38], [25], [26], [26, 26], [12, 13], [12, 13, 14]):
        ids = allowed_ids(made, answer)
        assert ids is not None
        assert (END in ids) == made.accepts(answer)
    assert allowed_ids(made, [25]) == [END]  # "x" can only end
    assert allowed_ids(made, [25, END]) is None
    assert allowed_ids(made, [0]) is None


@pytest.mark.parametrize(("vocab", "rows"), [(40, 1), (40, 3), (64, 2), (20, 2)])
def test_masks_are_put_on_logits_of_any_width(vocab: int, rows: int) -> None:
    seq = Sequence([5, 6], SamplingParams(temperature=0.7), 0)
    seq.constraint = fresh()
    free = Sequence([5, 6], SamplingParams(temperature=0.7), 0)
    logits = torch.randn(rows, vocab)
    read = [RowContext(seq), RowContext(free), RowContext(seq, (2, 30))][:rows]
    processed = process(logits, read)
    for row, history in zip(processed, read, strict=True):
        allowed = allowed_ids(fresh(), list(history.path)) if history.seq is seq else range(vocab)
        assert row.isfinite().nonzero().flatten().tolist() == [each for each in allowed or () if each < vocab]


def test_draft_rows_and_dead_ends_are_free() -> None:
    seq = Sequence([5, 6], SamplingParams(temperature=0.7), 0)
    seq.constraint = fresh()
    logits = torch.randn(2, 40)
    assert process(logits, [RowContext(seq, (), free=True), RowContext(seq, (30, 30))]).isfinite().all()


def test_a_fork_goes_its_own_way() -> None:
    seq = Sequence([5, 6], SamplingParams(max_tokens=50), 0, (END,))
    seq.constraint = fresh()
    seq.append(Token(2, "m"))
    twin = seq.fork(1)
    for token in (30, 38, 25):
        twin.append(Token(token, "m"))
    assert twin.constraint is not None
    assert twin.constraint is not seq.constraint
    assert allowed_ids(twin.constraint, twin.answer) == [END]
    assert allowed_ids(seq.constraint, seq.answer) == allowed_ids(fresh(), [2])


def test_masks_of_several_lengths() -> None:
    """Shorter and longer than the vocabulary; rows that are not constrained stay as they are."""
    logits = torch.randn(3, 11)
    kept = keep_allowed(logits, [0, 2], [np.array([0b110], dtype=np.uint8), np.full(9, 0xFF, dtype=np.uint8)])
    assert kept[0].isfinite().nonzero().flatten().tolist() == [1, 2]
    assert torch.equal(kept[1:], logits[1:])
    assert torch.equal(kept[0, 1:3], logits[0, 1:3])


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (regex("[0-9]{2}"), ["12"], ["1", "123", "a"]),
        (
            Structure.model_validate({"choice": ["yes", "n\u00f6", 'a"b\n', "\x7f"]}),
            ["yes", "n\u00f6", 'a"b\n', "\x7f"],
            ["y", "no"],
        ),
        (Structure(kind="json_object"), ["{}", '{"a": [1, null]}'], ["[]", "{", "1"]),
        (schema({"type": "integer", "minimum": 3, "maximum": 12}), ["3", "12"], ["2", "13", '"3"']),
        (Structure(kind="grammar", value='start: "<" /[a-z]+/ ">"'), ["<ab>"], ["<>", "<ab"]),
        (schema(True), ["1", '{"x": [true]}'], ["", "x"]),
    ],
)
def test_kinds(structure: Structure, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not fits(byte_compiler(), structure, text)] == []
    assert [text for text in bad if fits(byte_compiler(), structure, text)] == []


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        (schema(False), "no text fits"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "no value fits"),
        (schema({"type": "string", "minLength": 3, "maxLength": 2}), "no value fits"),
        (schema({"type": "array", "minItems": 3, "maxItems": 2}), "no value fits"),
        (schema({"allOf": [{"type": "integer"}, {"type": "string"}]}), "no value fits"),
        (schema(ENDLESS_SCHEMA), "infinite"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}), "infinite"),
        (schema({"type": "object", "required": ["a"], "patternProperties": {"^a$": {"$ref": "#"}}}), "infinite"),
        (Structure(kind="grammar", value='start: "a" start'), "infinite"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "string", "format": "no-such-format"}), "no-such-format"),
        (schema({"$ref": "#/$defs/missing"}), "missing"),
        (schema({"type": "nothing"}), "type"),
        (regex("a("), "regex"),
        (regex("[^\\x00-\\U0010ffff]"), "regex"),
        (Structure(kind="grammar", value="start: other"), "other"),
        (Structure(kind="grammar", value="%%%"), "grammar"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(structure: Structure, said: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        byte_compiler().compile(structure)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert (refused.value.field or "").partition(".")[0] == "structure"
    assert said in refused.value.message
    assert len(refused.value.message) < 600


@pytest.mark.parametrize(
    ("value", "is_endless"),
    [
        (ENDLESS_SCHEMA, True),
        ({**ENDLESS_SCHEMA, "required": []}, False),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "array", "items": {"$ref": "#"}}, False),
        ({"$ref": "#"}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, True),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, False),
        ({"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]}, True),
        ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, True),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"$ref": "#", "type": ["null", "object"]}, True),
        (True, False),
    ],
)
def test_values_without_end_are_found(value: Any, is_endless: bool) -> None:
    assert (endless(FlatSchema(value, "it").whole) is not None) == is_endless


@pytest.mark.parametrize(
    ("properties", "is_endless"),
    [
        ({"patternProperties": {"^a": {"$ref": "#"}}}, True),
        ({"patternProperties": {"^b": {"$ref": "#"}}}, False),
        ({"patternProperties": {"^b": {}}, "additionalProperties": {"$ref": "#"}}, True),
        ({"patternProperties": {"b$": {}}, "additionalProperties": {"$ref": "#"}}, False),
        ({"patternProperties": {"^a": {}, "b": {"$ref": "#"}}}, True),
        ({"patternProperties": {"(": {"$ref": "#"}}}, False),
    ],
)
def test_patterns_that_govern_a_required_name(properties: dict[str, Any], is_endless: bool) -> None:
    value = {"type": "object", "required": ["ab"], **properties}
    patterns = byte_compiler().vocabulary.shared(GrammarCompiler).patterns()
    assert (endless(FlatSchema(value, "it").whole, patterns) is not None) == is_endless


@pytest.mark.parametrize(
    ("grammar", "is_barren"),
    [
        ('start: "a" start', True),
        ('start: x\nx: "a" x | "b" x', True),
        ('start: x\nx: "a" x\n | "b" y // on\ny: x+ | (x x) ~ 2..3', True),
        ('start: x y\nx: "a"\ny: y', True),
        ('start: (x)+ | "c" start\nx: [start] start', True),
        ('start: "a" start | "b"', False),
        ('start: "a" x*\nx: x', False),
        ('start: "a" x?\nx: x "b"', False),
        ('start: "a" [x]\nx: x', False),
        ('start: "a" x{0,3}\nx: x', False),
        ('start: "a" x{2}\nx: x', True),
        ("start: A\nA: /[a-z]+/i", False),
        ('start: "a".."z" x\nx: -> empty', False),
        ('start: call | TEXT\nTEXT[lazy]: /.*/\ncall: "x" %json {"type": "object", "a": ["|", "\\""]}', False),
        ("%import common.INT\nstart: INT", False),
        ("start: elsewhere", False),
        ("start: " + "(" * 100 + "start" + ")" * 100, False),
        ("%%%", False),
        ("", False),
    ],
)
def test_grammars_that_no_text_completes_are_found(grammar: str, is_barren: bool) -> None:
    assert (barren(grammar) is not None) == is_barren


def test_long_chains_of_rules_are_looked_through_once() -> None:
    chain = "\n".join(f'r{place}: "a" r{place + 1}' for place in range(3000))
    assert barren(f"start: r0\n{chain}\nr3000: start") is not None
    assert barren(f'start: r0\n{chain}\nr3000: "b"') is None


def test_a_name_spelled_with_escapes_is_the_same_name() -> None:
    a_number = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    good = ['{"\\u0061": 3}', '{"\\u0062": "\\u0001\\n\\\\u0061"}', '{"b": "\\u007f"}']
    bad = ['{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"a": 1, "a": 2}']
    assert [text for text in good if not fits(byte_compiler(), a_number, text)] == []
    assert [text for text in bad if fits(byte_compiler(), a_number, text)] == []


def test_long_chains_of_references_are_looked_through_once() -> None:
    chain = {str(place): {"$ref": f"#/$defs/{place + 1}"} for place in range(4000)}
    whole: dict[str, Any] = {"$ref": "#/$defs/0", "$defs": {**chain, "4000": {"type": "null"}}}
    counted = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal counted
        counted += event == "call" and frame.f_code.co_name == "_finite"

    sys.setprofile(count)
    try:
        found = endless(whole)
    finally:
        sys.setprofile(None)
    assert found is None
    assert counted <= 2 * len(chain) + 10


def test_an_answer_is_checked_at_its_end() -> None:
    made = fresh()
    check_whole(made, [25])
    with pytest.raises(TurnoutError, match="does not fit") as wrong:
        check_whole(made, [2])
    assert wrong.value.code is Code.INTERNAL


def test_where_no_token_goes_on_the_answer_ends_and_with_an_error() -> None:
    compiler = Compiler(char_vocabulary("ab"))
    with pytest.raises(TurnoutError, match="no text fits"):
        compiler.compile(regex("Z"))
    stuck = compiler.compile(regex("aZ|bb")).clone()
    assert allowed_ids(stuck, [3]) == [3]
    assert allowed_ids(stuck, [2]) == [END]
    with pytest.raises(TurnoutError, match="could not be followed") as failed:
        check_whole(stuck, [2])
    assert failed.value.code is Code.OUT_OF_RANGE  # and not one that says: ask again


def test_a_grammar_that_costs_too_much_to_begin_with_is_refused_at_once() -> None:
    lexeme = "/[a-z ]*a[a-z ]{50}e[a-z ]{40}/ & /[a-z ]*o[a-z ]{50}[aeiou][a-z ]*/ & ~/.*(abc|bcd).{1,60}x.*/"
    compiler, started = Compiler(char_vocabulary("abcdeoxy")), time.process_time()
    with pytest.raises(TurnoutError, match="fuel exhausted") as refused:
        compiler.compile(Structure(kind="grammar", value=f"start: T\nT: {lexeme}"))
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, "structure")
    assert time.process_time() - started < 2.0


def test_where_a_grammar_becomes_too_complex_the_answer_ends_and_with_an_error() -> None:
    names = [f"r{number}" for number in range(20)]
    rules = "\n".join(f'{name}: "x" s "x" | "x" s' for name in names)
    ambiguous = Structure(kind="grammar", value=f'start: s\ns: "x" | {" | ".join(names)}\n{rules}')
    made = Compiler(char_vocabulary("xy")).compile(ambiguous).clone()
    assert allowed_ids(made, [2] * 10) == [END, 2]
    assert allowed_ids(made, [2] * 10, path=(2,) * 30) == [END]  # more ways to read it than may be followed
    assert allowed_ids(made, [2] * 40) == [END]
    with pytest.raises(TurnoutError, match=r"could not be followed to its end: .*2\d{3} items") as failed:
        check_whole(made, [2] * 40)
    assert failed.value.code is Code.OUT_OF_RANGE  # it would be again: not one that says: ask again
    # What it failed at is not followed again, which would take as long; anything else is.
    origin, made._origin = made._origin, None  # type: ignore[assignment]
    assert allowed_ids(made, [2] * 50) == [END]
    made._origin = origin
    assert allowed_ids(made, [2] * 12) == [END, 2]


def test_agreeing() -> None:
    assert agreeing([], [1]) == 0
    assert agreeing([1, 2, 3], [1, 2]) == 2
    assert agreeing([1, 2, 3], [1, 4, 3]) == 1
