"""The vocabulary's trie and automata walked over it: as token by token, and as llguidance's masks."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.random_vocabulary import random_vocabulary
from decoding import automaton_constraint
from decoding.automaton_constraint import STUCK, AutomatonConstraint
from decoding.constraints.base import Vocabulary
from decoding.constraints.span import SpanAutomaton
from decoding.grammars.compiler import GrammarCompiler
from decoding.structures import Compiler
from decoding.token_trie import DEAD, Ints, TokenTrie
from tests.constrained import END, allowed_ids, char_vocabulary
from turnout.structure import Structure

TEXT = "the cat and the hat; and then: the end (12, 3.5) of grün, ähnlich {a: [1]}. " * 3


class Texts:
    """Reads one of some texts, byte by byte: states are prefixes."""

    def __init__(self, texts: list[bytes]) -> None:
        self.prefixes = sorted({text[:size] for text in texts for size in range(len(text) + 1)})
        self.texts = set(texts)

    def step(self, states: Ints, data: npt.NDArray[np.uint8]) -> Ints:
        known = {prefix: place for place, prefix in enumerate(self.prefixes)}
        read = (self.prefixes[state] + bytes([byte]) for state, byte in zip(states, data.tolist(), strict=True))
        return np.array([known.get(each, DEAD) for each in read], dtype=np.int64)

    def is_final(self, state: int) -> bool:
        return self.prefixes[state] in self.texts


@cache
def vocabulary() -> Vocabulary:
    return random_vocabulary(3000)


def read_alone(automaton: Texts | SpanAutomaton, state: int, data: bytes) -> int:
    for byte in data:
        [state] = automaton.step(np.array([state]), np.array([byte], dtype=np.uint8)).tolist()
        if state == DEAD:
            break
    return state


def test_every_token_is_where_its_bytes_lead() -> None:
    tokens = [b"", b"ab", b"a", b"abc", b"ab", b"b", b"", b"ba", b"cab", b"\xff\x00"]
    trie = TokenTrie(tokens)
    assert len(trie) == len({data[:size] for data in tokens for size in range(len(data) + 1)})
    texts = Texts([b"abc", b"b", b"\xff\x00"])
    assert sorted(trie.allowed(texts, 0).tolist()) == [1, 2, 3, 4, 5, 9]
    assert sorted(trie.allowed(texts, texts.prefixes.index(b"a")).tolist()) == [5]
    assert trie.allowed(texts, texts.prefixes.index(b"abc")).size == 0
    assert TokenTrie([b"", b""]).allowed(texts, 0).size == 0


def test_a_walk_is_every_token_by_itself() -> None:
    trie, automaton = vocabulary().shared(TokenTrie.of), SpanAutomaton(TEXT)
    assert vocabulary().shared(TokenTrie.of) is trie
    for beginning in (b"", b"t", b"the", b"; and", "ähn".encode(), b" (12, 3"):
        state = read_alone(automaton, 0, beginning)
        wanted = [
            token for token, data in enumerate(trie.tokens) if data and read_alone(automaton, state, data) != DEAD
        ]
        assert sorted(trie.allowed(automaton, state).tolist()) == wanted


@pytest.mark.parametrize("seed", range(3))
def test_masks_of_spans_are_those_of_a_grammar(seed: int) -> None:
    draw = random.Random(seed)
    text = TEXT if seed == 0 else "".join(draw.choices("ab äß€\n𝄞", k=60))
    ours = Compiler(vocabulary()).compile(Structure(kind="span", value=text))
    lark = f"start: %regex {json.dumps({'substring_chars': text})}"
    theirs = vocabulary().shared(GrammarCompiler).lark("grammar", lark)
    answer: list[int] = []
    for _ in range(40):
        [one], [other] = ours.masks(answer, [()]), theirs.masks(answer, [()])
        assert one is not None
        assert other is not None
        if answer:
            assert np.array_equal(one, other)
        else:  # an answer has one character or more
            assert ours.accepts([]) is False
            assert np.array_equal(one | other, other)
        ids = allowed_ids(ours, answer)
        assert ids is not None
        token = draw.choice(ids)
        answer = [] if token == END else [*answer, token]


def test_a_text_that_the_vocabulary_cannot_write_ends_and_says_so() -> None:
    made = Compiler(char_vocabulary("ab")).compile(Structure(kind="span", value="abXb"))
    assert allowed_ids(made, []) == [2, 3]
    assert made.failure == ""
    assert allowed_ids(made, [2]) == [END, 3]
    only = Compiler(char_vocabulary("ab")).compile(Structure(kind="span", value="X"))
    assert allowed_ids(only, []) == [END]
    assert only.failure == STUCK


def test_masks_are_kept_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Compiler(char_vocabulary("abcdefgh")).compile(Structure(kind="span", value="abcdefgh"))
    assert isinstance(made, AutomatonConstraint)
    [mask] = made.masks([], [()])
    assert mask is not None
    monkeypatch.setattr(automaton_constraint, "MOST_BYTES", 3 * mask.nbytes)
    for _ in range(2):
        for size in range(8):
            assert allowed_ids(made, list(range(2, 2 + size))) == ([END, 2 + size] if size else list(range(2, 10)))
            assert len(made._masks._found) <= 3


def test_what_an_automaton_says_of_a_span() -> None:
    text = "abcabd"
    automaton = SpanAutomaton(text)
    parts = {text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for size in range(1, 5):
        for word in map("".join, np.stack(np.meshgrid(*[list("abcd")] * size), -1).reshape(-1, size).tolist()):
            state = read_alone(automaton, 0, word.encode())
            assert (state != DEAD) == (word in parts)
            if state != DEAD:
                assert automaton.is_final(state)
                assert automaton.ends[state] == text.index(word) + size
