"""Identifiers after a dot, over a vocabulary's tokens: which tokens begin, continue or end one of some names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from decoding.model import Decision, Readout, ReadSpec, TokenText
from decoding.state import ConstantDict, Stateful
from decoding.token_trie import DEAD, Ints, TokenTrie

# Bytes of an identifier; those of characters beyond ASCII count as such.
NAME_BYTES = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz") | frozenset(
    range(0x80, 0x100)
)
# A dot that is followed by a name, or by what is to come.
DEREFERENCE = re.compile(rb"\.(?=[A-Za-z_\x80-\xff]|\Z)")
BEGUN = re.compile(rb"\.([0-9A-Za-z_\x80-\xff]*)\Z")


class NameAutomaton:
    """A trie of names that reads one of them; behind a byte that is none of an identifier's it reads anything.

    Args:
        names: at least one, none of them empty.

    Attributes:
        free: the state behind a name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        edges: list[dict[int, int]] = [{}]
        ends = set[int]()
        for name in names:
            state = 0
            for byte in name.encode():
                if byte not in edges[state]:
                    edges[state][byte] = len(edges)
                    edges.append({})
                state = edges[state][byte]
            ends.add(state)
        self.free = len(edges)
        self._ends = frozenset(ends)
        table = np.full((self.free + 1, 256), DEAD, dtype=np.int64)
        for state, out in enumerate(edges):
            table[state, list(out)] = list(out.values())
        others = [byte for byte in range(256) if byte not in NAME_BYTES]
        table[np.ix_(sorted(ends), others)] = self.free
        table[self.free] = self.free
        self._table = table

    def step(self, states: Ints, data: npt.NDArray[np.uint8]) -> Ints:
        """See `ByteAutomaton.step`."""
        return np.where(states == DEAD, DEAD, self._table[states, data])

    def is_final(self, state: int) -> bool:
        """See `ByteAutomaton.is_final`."""
        return state == self.free or state in self._ends

    def read(self, data: bytes) -> int:
        """Return the state after some bytes from the beginning; `DEAD`: they begin none of the names."""
        state = 0
        for byte in data:
            state = int(self._table[state, byte])
            if state == DEAD:
                break
        return state


@dataclass(frozen=True, eq=False, slots=True)
class CodeTokens:
    """A vocabulary as `monitor_guided` reads it.

    Attributes:
        trie: of its tokens; special ones are no text.
        marks: tokens with a dereference: whether it is at their end.
    """

    trie: TokenTrie
    marks: Mapping[int, bool]

    @property
    def within(self) -> list[int]:
        """Tokens that a dereference is within."""
        return [token for token, at_end in self.marks.items() if not at_end]


@lru_cache(maxsize=8)
def code_tokens(texts: TokenText, vocab_size: int) -> CodeTokens:
    """Read a vocabulary; kept per object."""
    # Twice: the blank at the beginning of a text is left out by some tokenizers.
    tokens = [texts.token_bytes(token) if texts.decode([token, token]) else b"" for token in range(vocab_size)]
    found = {token: [each.start() for each in DEREFERENCE.finditer(data)] for token, data in enumerate(tokens)}
    marks = {token: places == [len(tokens[token]) - 1] for token, places in found.items() if places}
    return CodeTokens(TokenTrie(tokens), ConstantDict(marks))


class Dereference(Stateful):
    """Stop rule: a token that ends with a dot ends a stretch, and one with a dot and a name is to be chosen again.

    Args:
        marks: see `CodeTokens`.
    """

    name = "dereference"
    want = ReadSpec()

    def __init__(self, marks: Mapping[int, bool]) -> None:
        self.marks = marks

    def observe(self, token: int, row: Readout) -> Decision:
        """See `StopRule.observe`."""
        at_end = self.marks.get(token)
        return Decision.GO_ON if at_end is None else Decision.STOP if at_end else Decision.DROP
