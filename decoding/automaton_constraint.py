"""Constraints of automata that read bytes: masks by state, over the trie of the vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Rows

import numpy as np

from decoding.constraints.base import EIGHT, Constraint, Mask
from decoding.grammars.matcher import agreeing
from decoding.token_trie import DEAD, ByteAutomaton, TokenTrie

MOST_BYTES = 4 << 20  # of masks of an automaton's states: a pool keeps many automata
STUCK = "no token of the vocabulary can follow here"


class AutomatonMasks:
    """An automaton's masks over a vocabulary, by state; shared by all answers. May be used by several threads.

    Args:
        automaton: what the bytes of an answer are read by.
        trie: of the vocabulary.
        end_ids: tokens that end an answer.
    """

    def __init__(self, automaton: ByteAutomaton, trie: TokenTrie, end_ids: frozenset[int]) -> None:
        self.automaton = automaton
        self.trie = trie
        self.end_ids = end_ids
        self._found: dict[int, tuple[Mask, bool]] = {}

    def after(self, state: int, token: int) -> int:
        """Return the state after a token; `DEAD`: it cannot follow, or is no text."""
        data = self.trie.tokens[token] if 0 <= token < len(self.trie.tokens) else b""
        if not data:
            return DEAD
        for byte in data:
            if state == DEAD:
                break
            [state] = self.automaton.step(np.array([state]), np.array([byte], dtype=np.uint8)).tolist()
        return state

    def is_stuck(self, state: int) -> bool:
        """Return whether the text is not complete at a state, and the vocabulary cannot go on with it."""
        return self.at(state)[1]

    def at(self, state: int) -> tuple[Mask, bool]:
        """Return the mask at a state, and whether the vocabulary has no token that can follow there."""
        found = self._found.get(state)
        if found is None:
            found = self._made(state)
            if len(self._found) * found[0].nbytes >= MOST_BYTES:
                self._found.clear()
            self._found[state] = found
        return found

    def _made(self, state: int) -> tuple[Mask, bool]:
        mask = self.trie.mask(self.automaton, state)
        is_final = self.automaton.is_final(state)
        is_stuck = not is_final and not mask.any()
        for end in self.end_ids if is_final or is_stuck else ():
            if end < EIGHT * mask.size:
                mask[end // EIGHT] |= 1 << end % EIGHT
        return mask, is_stuck


class AutomatonConstraint(Constraint):
    """Walks an automaton along an answer.

    Args:
        masks: of the automaton.
    """

    def __init__(self, masks: AutomatonMasks) -> None:
        self.end_ids = masks.end_ids
        self.vocab_size = len(masks.trie.tokens)
        self.failure = ""
        self.remembers = False  # its masks are not to be made ahead
        self.is_lazy = True
        self._masks = masks
        self._at: list[int] = []  # tokens of an answer
        self._states: list[int] = []  # after each of them
        self._lock = threading.Lock()

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        """See `Constraint.masks`."""
        found: list[Mask | None] = []
        for path in paths:
            state = self._state(answer, path)
            mask, is_stuck = self._masks.at(state) if state != DEAD else (None, False)
            self.failure = STUCK if is_stuck else ""
            found.append(mask)
        return found

    def permits(self, answer: list[int], path: tuple[int, ...], token: int) -> bool:
        """See `Constraint.permits`: without a mask."""
        state = self._state(answer, path)
        if state == DEAD:
            return False
        if token not in self.end_ids:
            return self._masks.after(state, token) != DEAD
        return self._masks.automaton.is_final(state) or self._masks.is_stuck(state)

    def accepts(self, tokens: list[int]) -> bool:
        """See `Constraint.accepts`."""
        state = self._state(tokens, ())
        return state != DEAD and self._masks.automaton.is_final(state)

    def clone(self) -> AutomatonConstraint:
        """See `Constraint.clone`."""
        twin = type(self)(self._masks)
        with self._lock:
            twin._at, twin._states = list(self._at), list(self._states)
        return twin

    def _state(self, answer: list[int], path: tuple[int, ...]) -> int:
        """The state after an answer and a path; `DEAD`: they are no beginning of a text that fits."""
        with self._lock:
            kept = agreeing(self._at, answer)
            del self._at[kept:], self._states[kept:]
            state = self._states[-1] if self._states else 0
            for token in answer[kept:]:
                state = self._masks.after(state, token)
                self._at.append(token)
                self._states.append(state)
        for token in path:
            state = self._masks.after(state, token) if state != DEAD else DEAD
        return state
