"""Best-first search whose hypotheses are recombined into a lattice: many answers from few reads."""

from __future__ import annotations

import heapq
from itertools import count, islice
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from decoding.model import ModelPool, ReadSpec
from decoding.search._graph import Lattice
from decoding.search.base import MOST_OPEN, Hypothesis, Search, SearchTask, Selection, ordered
from turnout.errors import out_of_range
from turnout.registry import MethodParams

MOST_PATHS = 256  # of the lattice's ways, the likeliest, that answers are chosen from


class LatticeParams(MethodParams):
    """Parameters."""

    branches: Annotated[
        int, Field(ge=1, le=64, description="likeliest tokens after a hypothesis: one is followed, the others wait")
    ] = 5
    suffix: Annotated[
        int, Field(ge=1, le=64, description="hypotheses that end with that many equal tokens are merged")
    ] = 4
    distance: Annotated[
        int, Field(ge=0, le=4096, description="merged hypotheses differ in length by less; 0: none are merged")
    ] = 5
    merge: Annotated[
        Literal["zip", "one"],
        Field(description="zip: the equal tokens before are merged as well; one: only the last one is shared"),
    ] = "zip"
    length_penalty: Annotated[
        FiniteFloat,
        Field(ge=-16.0, le=16.0, description="a log-probability is divided by the length to this power"),
    ] = 1.0
    calls: Annotated[
        int | None,
        Field(ge=1, le=1_000_000, description="hypotheses read before none is begun; absent: width times max_tokens"),
    ] = None


class LatticeSearch(Search):
    """Recombined hypotheses, by paper #35 (Massive-scale Decoding for Text Generation using Lattices, Xu et al. 2022).

    The best hypothesis that waits is followed greedily to its end; at each step the other likely tokens begin
    hypotheses that wait. Nothing is pruned. Where one ends with the same tokens as another that was read, they are
    merged, and it is not followed on. The answers are the best ways through the lattice: after a merge, their
    log-probabilities are those that their tokens had where they were read. Under a structure or a ban, which may hold
    for one beginning and not for another, nothing is merged. `report` is the lattice.
    """

    Params = LatticeParams
    params: LatticeParams
    papers = (35,)

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        self._lattice: Lattice | None = None
        self._heap: list[tuple[float, int, Hypothesis]] = []  # those that wait
        self._order = count()
        self._current: Hypothesis | None = None
        self._ending: dict[tuple[int, ...], list[Hypothesis]] = {}  # nodes by the last tokens before and at them
        self._calls, self._completed, self._texts = 0, 0, models.tokenizer
        branches, calls = self.params.branches, self.params.calls
        most = MOST_OPEN // (2 * branches)  # half for those that follow when none is begun any more
        if calls is not None and calls > most:
            raise out_of_range(f"{self.where}.calls", f"{calls}; at most {most} with {branches} branches")
        self._budget = min(task.width * task.max_tokens, most) if calls is None else calls
        return super().begin(task, models)

    def reads(self, hypothesis: Hypothesis) -> ReadSpec:
        """See `Search.reads`."""
        return ReadSpec(draw=None, top_processed=min(self.params.branches, self.task.vocab_size))

    def pick(self, open_: list[Hypothesis]) -> list[Hypothesis]:
        """See `Search.pick`."""
        if self._lattice is None:
            self._lattice, self._current = Lattice(open_[0]), open_[0]
        while self._current is None and self._heap and self._calls < self._budget:
            _, _, each = heapq.heappop(self._heap)
            assert each.parent is not None
            if self._lattice.is_merged(each.parent) or self._lattice.follows(each.parent, each.token):
                continue  # the other one's continuations wait as well
            self._add(each)
            self._current = each
        self._calls += self._current is not None
        return [self._current] if self._current is not None else []

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        assert self._lattice is not None
        self._current, ended = None, list(done)
        for place, each in enumerate(self._different(candidates)):
            each.score = each.logp / float(each.length) ** self.params.length_penalty
            if place and not each.ended:
                heapq.heappush(self._heap, (-each.score, next(self._order), each))
            elif not place and (same := self._same(each)) is not None:
                self._merge(each, same)
            elif each.parent and not self._lattice.follows(self._lattice.node(each.parent), each.token):
                self._add(each)
                self._completed += each.ended
                self._current = self._current if each.ended else each
            if each.ended:
                ended.append(each)
        waiting = [each for _, _, each in self._heap]
        return Selection([*waiting, *([self._current] if self._current else [])], ended)

    def _different(self, candidates: list[Hypothesis]) -> list[Hypothesis]:
        """Continuations of one hypothesis, the best of those that differ in case and blanks alone."""
        found: dict[str, Hypothesis] = {}
        for each in candidates:
            text = self._texts.token_bytes(each.token).decode(errors="replace").strip().casefold()
            found.setdefault(text if text and not each.ended else f"\0{each.token}", each)
        return list(found.values())

    def _add(self, each: Hypothesis) -> None:
        assert self._lattice is not None
        self._lattice.add(each)
        self._ending.setdefault(self._last(each), []).append(each)

    def _last(self, each: Hypothesis) -> tuple[int, ...]:
        return tuple(node.token for node in each.last(self.params.suffix))

    def _same(self, each: Hypothesis) -> Hypothesis | None:
        """A node to merge a continuation into; None: there is none."""
        assert self._lattice is not None
        assert each.parent is not None
        if each.length < self.params.suffix or not self.task.is_free:
            return None
        before = self._lattice.node(each.parent)
        for other in self._ending.get(self._last(each), ()):
            node = self._lattice.node(other)
            near = abs(node.length - each.length) < self.params.distance
            if near and node.ended == each.ended and not self._lattice.reaches(node, before):
                return node
        return None

    def _merge(self, each: Hypothesis, node: Hypothesis) -> None:
        lattice = self._lattice
        assert lattice is not None
        assert each.parent is not None
        dropped = lattice.node(each.parent)
        lattice.connect(dropped, node, each.logp - each.parent.logp)
        while self.params.merge == "zip":
            into = next((other for other in lattice.before[node] if lattice.can_merge(dropped, other)), None)
            if into is None:
                return
            before = list(lattice.before[dropped])
            lattice.merge(dropped, into)
            if len(before) != 1:
                return
            dropped, node = before[0], into

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`: `pick` says so."""
        return False

    def best(self, open_: list[Hypothesis], done: list[Hypothesis]) -> list[Hypothesis]:
        """See `Search.best`."""
        assert self._lattice is not None
        found: list[Hypothesis] = []
        for _, path in islice(self._lattice.paths(), max(MOST_PATHS, 2 * self.task.answers)):
            here = before = self._lattice.start
            for node in path:
                logp = here.logp + self._lattice.before[node][before]
                if node.parent is here:  # nothing was merged so far: it is the hypothesis itself
                    here = node
                else:
                    here = Hypothesis(here, node.token, logp, here.length + 1, ended=node.ended, details=node.details)
                    here.merged = node
                before = node
            whole = here is path[-1] or here.token in self.task.end_ids or here.length == self.task.max_tokens
            if whole and here.length <= self.task.max_tokens:
                here.score = here.logp / float(here.length) ** self.params.length_penalty
                found.append(here)
        return ordered(found)

    @property
    def lattice(self) -> Lattice | None:
        """See `Search.lattice`."""
        return self._lattice

    def report(self) -> dict[str, Any] | None:
        """See `Search.report`."""
        assert self._lattice is not None
        return {**self._lattice.as_json(), "completed": self._completed, "calls": self._calls}


PART = LatticeSearch
