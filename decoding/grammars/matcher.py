"""Constraints by llguidance: a grammar is compiled once for a tokenizer, and every answer walks it on its own."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from decoding.constraints.base import ALL, EIGHT, Constraint, Mask

ESCAPES = re.compile(rb"(?:\\u(?!007[fF])[0-9a-fA-F]{4})+|\\[^u]")
MOST_FOUND = 512  # masks of one answer's paths

Respell = Callable[[list[int]], list[int] | None]


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens that may follow at a position, and the reason if none may."""

    mask: Mask | None
    failure: str = ""


class GrammarConstraint(Constraint):
    """Walks a grammar along an answer.

    A matcher stands somewhere, after tokens that are remembered with it; a call goes back to where these agree with
    what is asked and on from there, so that what it says depends on the tokens alone. A matcher that has failed
    stays so: then another one begins anew. What was found after one answer is remembered until another is asked about.

    Args:
        origin: a matcher at the beginning, which never moves.
        end_ids: tokens that end an answer.
        vocab_size: tokens that the matcher knows.
        respell: for JSON, the answer with every character as it is written plainly; None: it is already.

    Attributes:
        failure: why the grammar cannot be followed from where it was asked last; then only the end is allowed there.
    """

    def __init__(
        self, origin: LLMatcher, end_ids: frozenset[int], vocab_size: int, respell: Respell | None = None
    ) -> None:
        self.end_ids = end_ids
        self.failure = ""
        self.remembers = True
        self._origin = origin
        self.vocab_size = vocab_size
        self._respell = respell
        self._matcher = origin.deep_copy()
        self._at: list[int] = []  # where it stands
        self._answer: list[int] = []
        self._sure = 0  # number of tokens of `_at` that are the answer's
        self._broken: list[int] = []  # after these the matcher could not go on, and is of no use before it
        self._found: dict[tuple[int, ...], Found] = {}  # after the answer and a path
        self._lock = threading.Lock()

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        """See `Constraint.masks`."""
        with self._lock:
            self._turn_to(answer)
            if len(self._found) > MOST_FOUND:
                self._found.clear()
            # In this order each path has most in common with the one before it.
            for path in sorted(set(paths) - self._found.keys()):
                self._found[path] = self._read() if self._go(path) else self._off()
            found = [self._found[path] for path in paths]
            self.failure = found[-1].failure if found else ""
            return [each.mask for each in found]

    def accepts(self, tokens: list[int]) -> bool:
        """See `Constraint.accepts`."""
        with self._lock:
            self._turn_to(tokens)
            if not (self._go(()) and self._matcher.is_accepting()) or self._matcher.is_error():
                return False
            # A declared property whose name is spelled with escapes passes for an additional one.
            plain = self._respell(tokens) if self._respell is not None else None
            if plain is None:
                return True
            fresh = self._origin.deep_copy()
            return fresh.try_consume_tokens(plain) == len(plain) and fresh.is_accepting()

    def clone(self) -> GrammarConstraint:
        """See `Constraint.clone`."""
        with self._lock:
            twin = type(self)(self._origin, self.end_ids, self.vocab_size, self._respell)
            if not self._matcher.is_error():
                twin._matcher, twin._at = self._matcher.deep_copy(), list(self._at)
                twin._answer, twin._sure, twin._found = list(self._answer), self._sure, dict(self._found)
            return twin

    def _turn_to(self, answer: list[int]) -> None:
        """Move to an answer: results from now on are those after it."""
        if self._answer != answer:
            self._answer, self._found = list(answer), {}
            self._sure = agreeing(self._at, self._answer)

    def _go(self, path: tuple[int, ...]) -> bool:
        """Stand after the answer and a path; False where they are no beginning of a text that fits."""
        if self._matcher.is_error():
            # To follow it all again takes as long as it took, and ends the same.
            if [*self._answer, *path][: len(self._broken)] == self._broken:
                return False
            self._matcher, self._at, self._sure = self._origin.deep_copy(), [], 0
        rest = [*self._answer[self._sure :], *path]
        kept = agreeing(self._at[self._sure :], rest)
        back = len(self._at) - self._sure - kept
        if back:
            self._matcher.rollback(back)
            del self._at[self._sure + kept :]
        new = rest[kept:]
        if not self.end_ids.isdisjoint(new):
            return False
        taken = self._matcher.try_consume_tokens(new) if new else 0
        if taken != len(new):
            self._broken = [*self._at, *new]  # all of them: a matcher that fails does not report how many it took
        self._at += new[:taken]
        self._sure = min(len(self._at), len(self._answer))
        return taken == len(new)

    def _read(self) -> Found:
        matcher, ends = self._matcher, [end for end in self.end_ids if end < self.vocab_size]
        # Written in place, and without the interpreter's lock.
        mask = np.zeros(-(-self.vocab_size // 32) * 4, dtype=np.uint8)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        accepting = matcher.is_accepting()
        for end in ends:
            bit = 1 << end % EIGHT
            mask[end // EIGHT] = mask[end // EIGHT] | bit if accepting else mask[end // EIGHT] & (ALL ^ bit)
        if not matcher.is_error() and mask.any():
            return Found(mask)
        self._broken = list(self._at)
        return self._stuck(matcher.get_error() or "no token of the vocabulary can follow here")

    def _off(self) -> Found:
        """Where it could not be followed: tokens that do not fit, or a grammar that became too complex by them."""
        return self._stuck(self._matcher.get_error()) if self._matcher.is_error() else Found(None)

    def _stuck(self, failure: str) -> Found:
        mask = np.zeros(-(-self.vocab_size // 32) * 4, dtype=np.uint8)
        for end in self.end_ids:
            if end < self.vocab_size:
                mask[end // EIGHT] |= 1 << end % EIGHT
        return Found(mask, failure)


def respelled(text: bytes) -> bytes:
    """JSON with every character as `json.dumps` writes it, numbers and blanks as they are."""
    if b"\\" not in text:
        return text
    return ESCAPES.sub(lambda found: _plain(found[0]), text)


def _plain(escapes: bytes) -> bytes:
    try:
        return json.dumps(json.loads(b'"%s"' % escapes), ensure_ascii=False)[1:-1].encode()
    except ValueError:
        return escapes  # half of a surrogate pair


def agreeing(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(place for place in range(shorter) if one[place] != other[place])
