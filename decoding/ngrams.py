"""Indices over token lists: where a run of tokens stood before, and what followed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Stands between documents; no context holds it.
SEPARATOR = -1
# Of a token in a `SuffixIndex` with its runs, as Python holds them.
TOKEN_BYTES = 280


class GramIndex:
    """Where runs of one length begin in a growing list; a look-up costs the same however long the list is.

    Args:
        size: tokens of a run.
        latest: the last place a run stood at, rather than the first.
    """

    def __init__(self, size: int, latest: bool = False) -> None:
        self._size = size
        self._latest = latest
        self._starts: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def find(self, tokens: list[int], *then: int) -> int | None:
        """Where the run at the end of a list stood before in it.

        Args:
            tokens: the list of the call before, grown or not.
            then: a token that will be behind it; none or one.
        """
        end = len(tokens) + len(then) - self._size
        for start in range(self._num_indexed, end):
            run = tuple(tokens[start : start + self._size])
            if self._latest or run not in self._starts:
                self._starts[run] = start
        self._num_indexed = max(end, self._num_indexed)
        return self._starts.get((*tokens[end:], *then)) if end > 0 else None


class SuffixMatcher:
    """Follows a text token by token, and knows where its longest suffix that occurs in a source stands there.

    A suffix automaton of the source: built in time linear in it, a constant number of steps per token read.

    Args:
        source: what is searched.
    """

    def __init__(self, source: Iterable[int]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        last = 0
        for token in source:
            last = self._append(token, last)
        # A state that others link to stands for a run that occurs more than once.
        self._repeated = set(self._link)
        self._state = 0
        self._matched = 0

    def read(self, token: int) -> None:
        """Append a token to the text."""
        state = self._state
        while state and token not in self._next[state]:
            state = self._link[state]
            self._matched = self._length[state]
        following = self._next[state].get(token)
        self._matched = 0 if following is None else self._matched + 1
        self._state = following or 0

    @property
    def place(self) -> int | None:
        """The place in the source behind the suffix; None where no suffix occurs, or the longest one repeatedly."""
        if not self._matched or self._state in self._repeated:
            return None
        return self._length[self._state]

    def _append(self, token: int, last: int) -> int:
        new = self._add({}, self._length[last] + 1, 0)
        state = last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        return new

    def _split(self, state: int, token: int) -> int:
        """The state for the longest run that ends with `token` after `state`'s, made where it is not its own yet."""
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        twin = self._add(dict(self._next[following]), self._length[state] + 1, self._link[following])
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = twin
            state = self._link[state]
        self._link[following] = twin
        return twin

    def _add(self, following: dict[int, int], length: int, link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        return len(self._length) - 1


@dataclass(frozen=True, slots=True)
class Match:
    """Places behind a context's longest suffix that was found, and that suffix's length in tokens (0: none)."""

    length: int
    continuations: list[list[int]]


class SuffixIndex:
    """Finds a context's longest known suffix and what followed it; tokens are only ever added.

    Places of a run are chained from the latest back, so adding a token and a look-up take constant time. Of a run
    that occurs very often, only the latest places are looked at.

    Args:
        most_places: places of a run looked at.
    """

    longest = 16
    _sizes = (4, 2)

    def __init__(self, most_places: int = 64) -> None:
        self._most_places = most_places
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before: dict[int, list[int]] = {size: [] for size in self._sizes}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """More of the text; `SEPARATOR` ends a document."""
        for token in tokens:
            place = len(self._tokens)
            for size, before in self._before.items():
                run = tuple(self._tokens[max(place - size, 0) : place])
                if token == SEPARATOR or len(run) < size:
                    before.append(-1)
                else:
                    before.append(self._last.get(run, -1))
                    self._last[run] = place
            self._tokens.append(token)

    def find(self, context: list[int], most: int) -> Match:
        """Continuations of the longest suffix of 16 down to 2 tokens, the latest first.

        Args:
            context: what is to be continued; only its end is looked at.
            most: tokens of a continuation.
        """
        for size in self._sizes:
            longest = 0
            places: list[int] = []
            for place in self._places(context[-size:]):
                length = self._common(place, context)
                if length > longest:
                    longest, places = length, []
                if length == longest:
                    places.append(place)
            if places:
                return Match(longest, [self._continuation(place, most) for place in places])
        return Match(0, [])

    def _places(self, run: list[int]) -> Iterator[int]:
        place = self._last.get(tuple(run), -1)
        for _ in range(self._most_places):
            if place < 0:
                return
            yield place
            place = self._before[len(run)][place]

    def _common(self, place: int, context: list[int]) -> int:
        """Tokens before a place that are those at the end of the context."""
        most = min(place, len(context), self.longest)
        for length in range(most):
            if self._tokens[place - 1 - length] != context[-1 - length]:
                return length
        return most

    def _continuation(self, place: int, most: int) -> list[int]:
        tokens = self._tokens[place : place + most]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class RecentTexts:
    """The latest documents, searchable by suffix. The older half is forgotten at once when the newer one is full.

    Args:
        most: tokens kept, about.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        self._most = most
        self._newer = SuffixIndex()
        self._older = SuffixIndex()

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    @property
    def nbytes(self) -> int:
        """About the bytes they take."""
        return TOKEN_BYTES * len(self)

    def add(self, document: list[int]) -> None:
        """A finished document; of one that is too long, the end is kept."""
        half = self._most // 2
        if len(self._newer) + len(document) >= half:
            self._older, self._newer = self._newer, SuffixIndex()
        self._newer.add([*document[-(half - 1) :], SEPARATOR])

    def find(self, context: list[int], most: int) -> Match:
        """See `SuffixIndex.find`."""
        return longest_of([self._newer.find(context, most), self._older.find(context, most)])


def longest_of(matches: list[Match]) -> Match:
    """The longest match; equally long ones count together."""
    length = max(match.length for match in matches)
    return Match(length, [tokens for match in matches if match.length == length for tokens in match.continuations])
