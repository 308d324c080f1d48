"""A lattice of hypotheses: an acyclic graph of tokens in which every way from the start to an end is an answer."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Any

from decoding.search.base import Hypothesis

MOST_COUNTED = 10**15  # ways through a lattice
Way = tuple[Hypothesis, "Way | None"]  # a node and the way to it


class Lattice:
    """Graph of hypotheses, of which some are merged: a node stands for all that were merged into it.

    Args:
        start: hypothesis of the empty answer.

    Attributes:
        before: of each node, the nodes before it, with the log-probability of its token after them, nats.
        after: of each node, the nodes after it.
        ends: nodes at which answers end.
    """

    def __init__(self, start: Hypothesis) -> None:
        self.start = start
        self.before: dict[Hypothesis, dict[Hypothesis, float]] = {start: {}}
        self.after: dict[Hypothesis, dict[Hypothesis, None]] = {start: {}}
        self.ends: dict[Hypothesis, None] = {}
        self._merged: dict[Hypothesis, Hypothesis] = {}
        self._levels = {start: 0}  # each above those of the nodes before: no way leads to one that is not above

    def node(self, each: Hypothesis) -> Hypothesis:
        """Return the node that stands for a hypothesis of the graph."""
        while each in self._merged:
            each = self._merged[each]
        return each

    def is_merged(self, each: Hypothesis) -> bool:
        """Return whether another node stands for it."""
        return each in self._merged

    def follows(self, each: Hypothesis, token: int) -> bool:
        """Return whether a token follows a node."""
        return any(after.token == token for after in self.after[each])

    def add(self, each: Hypothesis) -> None:
        """Add a hypothesis after its parent."""
        assert each.parent is not None
        self.before[each], self.after[each], self._levels[each] = {}, {}, 0
        self.connect(self.node(each.parent), each, each.logp - each.parent.logp)
        if each.ended:
            self.ends[each] = None

    def connect(self, one: Hypothesis, other: Hypothesis, logprob: float) -> None:
        """Let a node follow another one, where it does not yet; no way leads back."""
        self.before[other].setdefault(one, logprob)
        self.after[one][other] = None
        left = [(other, self._levels[one] + 1)]
        while left:
            here, level = left.pop()
            if self._levels[here] < level:
                self._levels[here] = level
                left += [(each, level + 1) for each in self.after[here]]

    def reaches(self, one: Hypothesis, other: Hypothesis) -> bool:
        """Return whether a way leads from one node to another, or they are the same."""
        seen, left, levels = {one}, [one], self._levels
        while left:
            here = left.pop()
            if here is other:
                return True
            if levels[here] >= levels[other]:
                continue
            new = [each for each in self.after[here] if each not in seen]
            seen.update(new)
            left += new
        return False

    def can_merge(self, one: Hypothesis, other: Hypothesis) -> bool:
        """Return whether two nodes hold the same token, and merging them makes no circle."""
        if one is other or self.start in (one, other) or one.token != other.token or one.ended != other.ended:
            return False
        return not self.reaches(one, other) and not self.reaches(other, one)

    def merge(self, one: Hypothesis, into: Hypothesis) -> None:
        """Let a node stand for another one as well; it takes over the ways to it and from it.

        What follows both with the same token is merged in turn, so that no answer is spelled twice.
        """
        left = [(one, into)]
        while left:
            one, into = left.pop()
            if one in self.before and into in self.before and self.can_merge(one, into):
                left += reversed(self._merge(one, into))

    def _merge(self, one: Hypothesis, into: Hypothesis) -> list[tuple[Hypothesis, Hypothesis]]:
        """Merge two nodes; return what follows both with the same token, in pairs."""
        for each, logprob in self.before.pop(one).items():
            del self.after[each][one]
            self.connect(each, into, logprob)
        following = self.after.pop(one)
        del self._levels[one]
        known = {each.token: each for each in self.after[into]}
        for each in following:
            self.connect(into, each, self.before[each].pop(one))
        if one in self.ends:
            del self.ends[one]
            self.ends[into] = None
        self._merged[one] = into
        return [(each, known[each.token]) for each in following if each.token in known]

    def in_order(self) -> list[Hypothesis]:
        """Return all nodes, each after those before it."""
        waiting = {each: len(before) for each, before in self.before.items()}
        found, ready = [], [self.start]
        while ready:
            here = ready.pop()
            found.append(here)
            for each in self.after[here]:
                waiting[each] -= 1
                if not waiting[each]:
                    ready.append(each)
        return found

    def num_paths(self) -> int:
        """Return the number of ways from the start to an end, up to `MOST_COUNTED`."""
        ways = {self.start: 1}
        for each in self.in_order()[1:]:
            ways[each] = min(sum(ways[before] for before in self.before[each]), MOST_COUNTED)
        return min(sum(ways[each] for each in self.ends), MOST_COUNTED)

    def paths(self) -> Iterator[tuple[float, list[Hypothesis]]]:
        """Yield the ways from the start to an end with their log-probabilities, the likeliest first."""
        rest: dict[Hypothesis, float] = {}
        for each in reversed(self.in_order()):
            ways = [self.before[after][each] + rest[after] for after in self.after[each] if after in rest]
            if each in self.ends:
                rest[each] = 0.0
            elif ways:
                rest[each] = max(ways)
        order, heap = count(), list[tuple[float, int, float, Way]]()
        if self.start in rest:
            heap.append((-rest[self.start], next(order), 0.0, (self.start, None)))
        while heap:
            _, _, logp, way = heapq.heappop(heap)
            here = way[0]
            if here in self.ends:
                yield logp, _nodes(way)[1:]
                continue
            for after in self.after[here]:
                if after in rest:
                    longer = logp + self.before[after][here]
                    heapq.heappush(heap, (-longer - rest[after], next(order), longer, (after, way)))

    def as_json(self) -> dict[str, Any]:
        """Return nodes (their tokens, the start left out: it is -1), edges by places of nodes, and the ends."""
        nodes = self.in_order()
        place = {each: index for index, each in enumerate(nodes)}
        return {
            "tokens": [each.token for each in nodes],
            "edges": [
                [place[before], place[each], round(logprob, 6)]
                for each in nodes
                for before, logprob in self.before[each].items()
            ],
            "ends": sorted(place[each] for each in self.ends),
            "paths": self.num_paths(),
        }


def _nodes(way: Way | None) -> list[Hypothesis]:
    found: list[Hypothesis] = []
    while way is not None:
        node, way = way
        found.append(node)
    return found[::-1]
