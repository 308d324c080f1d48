"""A trie over the bytes of a vocabulary's tokens, made once and shared: masks of automata that read bytes.

An automaton is walked over the trie, one depth at a time, for all live nodes at once: what tokens have in common is
read once, and what cannot follow is left at its first byte.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import numpy.typing as npt

from decoding.constraints.base import Mask, Vocabulary
from decoding.grammars.compiler import tokenizer_of

Ints = npt.NDArray[np.int64]
DEAD = -1


class ByteAutomaton(Protocol):
    """A deterministic automaton over bytes. It never changes; its states are integers from 0 on, 0 is the start."""

    def step(self, states: Ints, data: npt.NDArray[np.uint8]) -> Ints:
        """Return the state after each of some states and a byte: int64 [n], `DEAD` where the byte cannot follow."""
        ...

    def is_final(self, state: int) -> bool:
        """Return whether what led to a state is a whole text."""
        ...


class TokenTrie:
    """The trie of a vocabulary: `vocabulary.shared(TokenTrie.of)`. It never changes.

    Args:
        tokens: bytes by token id; empty: the token is no text, and not in the trie.

    Attributes:
        tokens: see above.
    """

    def __init__(self, tokens: Rows[bytes]) -> None:
        self.tokens = tokens
        order = sorted((token for token in range(len(tokens)) if tokens[token]), key=tokens.__getitem__)
        sizes = np.array([len(tokens[token]) for token in order], dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        data = np.frombuffer(b"".join(tokens[token] for token in order), dtype=np.uint8)
        nodes = np.zeros(len(order), dtype=np.int64)  # of each token's beginning, as far as it has been read
        same = np.ones(len(order), dtype=bool)  # whether that is also the beginning of the token before
        same[:1] = False
        count, labels, parents = 1, [np.zeros(1, dtype=np.uint8)], [np.zeros(1, dtype=np.int64)]
        for depth in range(int(sizes.max(initial=0))):
            here = np.flatnonzero(sizes > depth)
            read = data[starts[here] + depth]
            before = np.maximum(here - 1, 0)
            same[here] &= sizes[before] > depth
            same[here] &= data[starts[before] + np.minimum(depth, sizes[before] - 1)] == read
            new = ~same[here]
            labels.append(read[new])
            parents.append(nodes[here[new]])
            nodes[here] = count - 1 + np.cumsum(new)
            count += int(new.sum())
        self._labels = np.concatenate(labels)
        # Nodes are numbered by depth, then by text: the children of one, and the tokens at one, are neighbours.
        self._num_children, self._first_child = _grouped(np.concatenate(parents)[1:], count, 1)
        by_node = np.argsort(nodes, kind="stable")
        self._token_ids = np.array(order, dtype=np.int64)[by_node]
        self._num_tokens, self._first_token = _grouped(nodes[by_node], count, 0)

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> TokenTrie:
        """Make the trie of a vocabulary. Special tokens, and ids that are no token, are no text."""
        tokenizer = vocabulary.shared(tokenizer_of)
        tokens = []
        for token in range(tokenizer.vocab_size):
            data = tokenizer.decode_bytes([token])
            is_text = not tokenizer.is_special_token(token) and token not in vocabulary.end_ids
            tokens.append(data if is_text and data != b"<[%d]>" % token else b"")
        return cls(tokens)

    def __len__(self) -> int:
        """Return the number of nodes, the root included."""
        return len(self._labels)

    def allowed(self, automaton: ByteAutomaton, state: int) -> Ints:
        """Return ids of the tokens whose bytes an automaton can read from a state on: int64 [n], in no order."""
        nodes, states = np.zeros(1, dtype=np.int64), np.array([state], dtype=np.int64)
        found = []
        while nodes.size:
            counts = self._num_children[nodes]
            children = _spread(self._first_child[nodes], counts)
            states = automaton.step(np.repeat(states, counts), self._labels[children])
            alive = states != DEAD
            nodes, states = children[alive], states[alive]
            found.append(nodes)
        ends = np.concatenate(found)
        return self._token_ids[_spread(self._first_token[ends], self._num_tokens[ends])]

    def beginning_with(self, data: bytes) -> Ints:
        """Return ids of the tokens whose bytes begin with `data`, those that are `data` included: int64 [n]."""
        node = 0
        for byte in data:
            first, end = self._first_child[node], self._first_child[node] + self._num_children[node]
            place = first + np.searchsorted(self._labels[first:end], byte)
            if place == end or self._labels[place] != byte:
                return np.zeros(0, dtype=np.int64)
            node = int(place)
        nodes, found = np.array([node], dtype=np.int64), []
        while nodes.size:
            found.append(nodes)
            nodes = _spread(self._first_child[nodes], self._num_children[nodes])
        ends = np.concatenate(found)
        return self._token_ids[_spread(self._first_token[ends], self._num_tokens[ends])]

    def mask(self, automaton: ByteAutomaton, state: int) -> Mask:
        """Return `allowed` as a mask: uint8, with as many bytes as GrammarConstraint's have."""
        bits = np.zeros(-(-len(self.tokens) // 32) * 32, dtype=np.uint8)
        bits[self.allowed(automaton, state)] = 1
        return np.packbits(bits, bitorder="little")


def _grouped(owners: Ints, count: int, first: int) -> tuple[Ints, Ints]:
    """How many entries each of `count` owners has, and where they begin: entries are in the order of their owners."""
    sizes = np.bincount(owners, minlength=count).astype(np.int64)
    return sizes, first + np.cumsum(sizes) - sizes


def _spread(starts: Ints, sizes: Ints) -> Ints:
    """All numbers of some ranges, one range after the other."""
    ends = np.cumsum(sizes)
    spread: Ints = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(starts - (ends - sizes), sizes)
    return spread
