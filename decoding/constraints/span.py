"""A text of which the answer is a verbatim part, of one character or more."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from decoding.automaton_constraint import AutomatonConstraint, AutomatonMasks
from decoding.constraints.base import Constraint, ConstraintKind, Vocabulary
from decoding.token_trie import DEAD, Ints, TokenTrie


class SpanAutomaton:
    """The suffix automaton of a text (Blumer et al. 1985): it reads the text's parts, in whole characters.

    Args:
        text: not empty.

    Attributes:
        ends: int32 [states]: number of bytes of the text up to where the first occurrence of a state's parts ends.
    """

    def __init__(self, text: str) -> None:
        data = text.encode()
        edges, ends = _suffix_automaton(data)
        # A part begins with a character; no state but the first has other bytes that begin one before it.
        edges[0] = {byte: state for byte, state in edges[0].items() if not _continues(byte)}
        keys = np.array([state << 8 | byte for state, out in enumerate(edges) for byte in out], dtype=np.int32)
        order = np.argsort(keys)
        self._keys = keys[order]
        self._targets = np.array([target for out in edges for target in out.values()], dtype=np.int32)[order]
        self.ends = np.array(ends, dtype=np.int32)
        whole = np.array([not _continues(byte) for byte in data] + [True])
        self._is_final = whole[self.ends]
        self._is_final[0] = False

    def step(self, states: Ints, data: npt.NDArray[np.uint8]) -> Ints:
        """See `ByteAutomaton.step`."""
        wanted = (states << 8 | data).astype(np.int32)  # as the keys: else they would be copied to be compared
        places = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where((states != DEAD) & (self._keys[places] == wanted), self._targets[places], DEAD).astype(np.int64)

    def is_final(self, state: int) -> bool:
        """See `ByteAutomaton.is_final`."""
        return bool(self._is_final[state])


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is within a character."""
    return 0x80 <= byte < 0xC0


def _suffix_automaton(data: bytes) -> tuple[list[dict[int, int]], list[int]]:
    """Edges by state, and the end of the first occurrence of each state's parts."""
    edges: list[dict[int, int]] = [{}]
    links, lengths, ends, last = [-1], [0], [0], 0
    for place, byte in enumerate(data, 1):
        made = len(edges)
        edges.append({})
        links.append(0)
        lengths.append(place)
        ends.append(place)
        at = last
        while at != -1 and byte not in edges[at]:
            edges[at][byte] = made
            at = links[at]
        if at != -1:
            old = edges[at][byte]
            if lengths[at] + 1 != lengths[old]:
                twin = len(edges)
                edges.append(dict(edges[old]))
                links.append(links[old])
                lengths.append(lengths[at] + 1)
                ends.append(ends[old])
                links[old] = twin
                while at != -1 and edges[at].get(byte) == old:
                    edges[at][byte] = twin
                    at = links[at]
                old = twin
            links[made] = old
        last = made
    return edges, ends


class Span(ConstraintKind):
    """See the module."""

    examples: ClassVar = [("abcabd", "abd"), ("gr\u00fc\u00dfe an alle", "\u00fc\u00dfe a")]

    @classmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """See `ConstraintKind.compile`."""
        masks = AutomatonMasks(SpanAutomaton(value), vocabulary.shared(TokenTrie.of), vocabulary.end_ids)
        return AutomatonConstraint(masks)

    @classmethod
    def rule(cls, value: str) -> str:
        """See `ConstraintKind.rule`."""
        parts = f"%regex {json.dumps({'substring_chars': value}, ensure_ascii=False)}"
        return f"%lark {{\nstart: PART\nPART: {parts} & /(?s:.+)/\n}}"


PART = Span
