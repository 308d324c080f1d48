"""The constraint of an answer that may think first: free until thinking ends, held to a structure after it.

Also the thinking budget: after its number of tokens the tokens of its end marker are the only ones allowed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Rows
from copy import copy
from functools import lru_cache

import numpy as np

from decoding.constraints.base import ALL, ANY, EIGHT, Constraint, Mask
from decoding.model import TokenText
from decoding.thinking import Phase, Thinking, ThinkingWalk


class _Place:
    """Place in an answer: what of thinking, its markers and the structure is behind it.

    Attributes:
        begins: number of tokens before the structure; None: it has not begun.
    """

    def __init__(self, thinking: Thinking, tokens: TokenText, bound: bool) -> None:
        self._thinking = thinking
        self._bound = bound
        self.walk = ThinkingWalk(thinking, tokens)
        self.begins: int | None = 0 if bound and thinking.start == "closed" else None
        self._count = 0
        self._opening: int | None = 0 if thinking.start == "open" else None  # tokens of a header or of `begin`
        self._direct = bool(thinking.direct)  # whether these can be those of the answer's header
        self._closing = 0  # tokens of `end`, in the harmony format
        self._gap = 0

    def feed(self, token: int) -> None:
        """Take the next token."""
        self._count += 1
        gap = self._thinking.gap
        if self.begins is not None:
            if self._gap < len(gap) and self.begins == self._count - 1 and token == gap[self._gap]:
                self._gap, self.begins = self._gap + 1, self._count
            else:
                self._gap = len(gap)
            return
        if self._thinking.channels is not None and self._bound:
            end = self._thinking.end.ids
            due = end[self._closing] if self._closing or self.walk.thinks else None
            self._closing = (self._closing + 1) % len(end) if token == due else 0
        self.walk.feed(token)
        if not self._bound:
            return
        if self._opening is not None:
            self._open(token, self._opening)
        elif self.walk.phase is Phase.ANSWER:
            self.begins = self._count

    def _open(self, token: int, place: int) -> None:
        begin, direct = self._thinking.begin.ids, self._thinking.direct
        self._direct = self._direct and token == direct[place]
        if self._direct and place + 1 == len(direct):
            self._opening, self.begins, self._gap = None, self._count, len(self._thinking.gap)
        elif token == begin[place]:
            self._opening = place + 1 if place + 1 < len(begin) else None
        elif self._direct:
            self._opening = place + 1
        else:
            self._opening, self._gap = None, len(self._thinking.gap)
            self.begins = 0 if self._thinking.channels is None else self._count

    def options(self) -> tuple[int | None, tuple[int, ...], bool]:
        """Return what may come next.

        Returns:
            The place from which the structure says what may follow, None where it does not; tokens that may follow
            besides; and whether anything else may.
        """
        thinking = self._thinking
        if self.begins is not None:
            gap = thinking.gap[self._gap : self._gap + 1] if self.begins == self._count else ()
            return (None if gap and self._gap else self.begins), gap, False
        due = self.walk.due()
        if due is not None:
            return None, (due,), False
        if not self._bound:
            return None, (), True
        if self._opening is not None:
            more = (thinking.begin.ids[self._opening],)
            if thinking.channels is None:
                return 0, more, False
            return None, more + ((thinking.direct[self._opening],) if self._direct else ()), False
        if self._closing:
            return None, (thinking.end.ids[self._closing],), False
        return None, (), True

    def clone(self) -> _Place:
        twin = copy(self)
        twin.walk = self.walk.clone()
        return twin


class ThinkingConstraint(Constraint):
    """Constraint of an answer that may think.

    Args:
        thinking: of the answer.
        tokens: the pool's tokenizer.
        inner: of what follows the thinking; None: it is free.
        end_ids: tokens that end the answer.
        vocab_size: number of tokens that the tokenizer knows.
    """

    def __init__(
        self, thinking: Thinking, tokens: TokenText, inner: Constraint | None, end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.end_ids = inner.end_ids if inner is not None else end_ids
        self.vocab_size = inner.vocab_size if inner is not None else vocab_size
        self._args = (thinking, tokens)
        self.failure = ""
        self.remembers = inner is not None
        self._inner = inner
        self._at: list[int] = []
        self._place = self._start()
        self._lock = threading.Lock()

    def _start(self) -> _Place:
        return _Place(*self._args, self._inner is not None)

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        """See `Constraint.masks`."""
        with self._lock:
            base = self._after(answer)
            places = []
            for path in paths:
                place = base.clone()
                for token in path:
                    place.feed(token)
                places.append(place)
            options = [place.options() for place in places]
            bound = self._bound(answer, [(path, each[0]) for path, each in zip(paths, options, strict=True)])
            self.failure = self._inner.failure if self._inner is not None else ""
            return [
                self._mask(place, mask, begins is not None, more, free)
                for place, mask, (begins, more, free) in zip(places, bound, options, strict=True)
            ]

    def _after(self, answer: list[int]) -> _Place:
        """Stand after an answer."""
        if answer[: len(self._at)] != self._at:
            self._at, self._place = [], self._start()
        for token in answer[len(self._at) :]:
            self._place.feed(token)
        self._at += answer[len(self._at) :]
        return self._place

    def _bound(self, answer: list[int], asked: list[tuple[tuple[int, ...], int | None]]) -> list[Mask | None]:
        """Return the structure's masks, None where it is not asked."""
        found: list[Mask | None] = [None] * len(asked)
        for inside in (True, False):  # whether it begins in the answer, or at its end or in a path
            slots = [
                slot
                for slot, (_, begins) in enumerate(asked)
                if begins is not None and (begins < len(answer)) == inside
            ]
            if not slots or self._inner is None:
                continue
            begins = [asked[slot][1] or 0 for slot in slots]
            rest = answer[begins[0] :] if inside else []
            cuts = [0 if inside else begin - len(answer) for begin in begins]
            masks = self._inner.masks(rest, [asked[slot][0][cut:] for slot, cut in zip(slots, cuts, strict=True)])
            for slot, mask in zip(slots, masks, strict=True):
                found[slot] = mask
        return found

    def _mask(self, place: _Place, mask: Mask | None, asked: bool, more: tuple[int, ...], free: bool) -> Mask | None:
        if free and self._inner is None:
            return ANY
        if free:
            return self._thinking_mask(place)
        if asked and not more:
            return mask
        made = np.zeros(-(-self.vocab_size // EIGHT), dtype=np.uint8) if mask is None else mask.copy()
        for token in more:
            made[token // EIGHT] |= 1 << token % EIGHT
        return made

    def _thinking_mask(self, place: _Place) -> Mask:
        """All tokens but those that end the answer, or stand astride the end of thinking."""
        thinking, tokens = self._args
        barred = set(self.end_ids)
        if thinking.channels is not None:
            channels = thinking.channels
            barred |= {channels.start, channels.channel, channels.message, *channels.ends} - {thinking.end.ids[0]}
        elif thinking.end.token is None:
            astride = _astride(tokens, self.vocab_size, thinking.end.text.encode())
            barred = barred.union(*(astride[size] for size in place.walk.begun()))
        mask = np.full(-(-self.vocab_size // EIGHT), ALL, dtype=np.uint8)
        for token in barred:
            if token < self.vocab_size:
                mask[token // EIGHT] &= ALL ^ (1 << token % EIGHT)
        return mask

    def accepts(self, tokens: list[int]) -> bool:
        """See `Constraint.accepts`."""
        if self._inner is None:
            return True
        place = self._start()
        for token in tokens:
            place.feed(token)
        begins = place.options()[0] if place.begins is None else place.begins
        return begins is not None and self._inner.accepts(tokens[begins:])

    def clone(self) -> ThinkingConstraint:
        """See `Constraint.clone`."""
        with self._lock:
            inner = self._inner.clone() if self._inner is not None else None
            twin = type(self)(*self._args, inner, self.end_ids, self.vocab_size)
            twin._at, twin._place = list(self._at), self._place.clone()
            return twin


async def look_astride(thinking: Thinking | None, tokens: TokenText, vocab_size: int) -> None:
    """Read the vocabulary for `ThinkingConstraint`, off the event loop, where the end of thinking is text.

    Args:
        thinking: of an answer whose structure follows it.
        tokens: the pool's tokenizer; what is read is kept per object.
        vocab_size: number of tokens that it knows.
    """
    if thinking is not None and thinking.channels is None and thinking.end.token is None:
        await asyncio.to_thread(_astride, tokens, vocab_size, thinking.end.text.encode())


@lru_cache(maxsize=8)
def _astride(tokens: TokenText, vocab_size: int, marker: bytes) -> list[set[int]]:
    """Return, by the length of the marker's beginning that is there, tokens that complete it and do not end there."""
    found: list[set[int]] = [set() for _ in marker]
    for token in range(vocab_size):
        data = tokens.token_bytes(token)
        if 0 <= data.find(marker) < len(data) - len(marker):
            for each in found:
                each.add(token)
        for size in range(1, len(marker)):
            rest = marker[size:]
            if len(data) > len(rest) and data.startswith(rest):
                found[size].add(token)
    return found
