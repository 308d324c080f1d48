"""Best-first beam search: the answers of a beam, from fewer reads, as the best hypothesis of all continues first."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from decoding.model import ModelPool, Readout
from decoding.search.base import Hypothesis, Search, SearchTask, Selection
from turnout.registry import MethodParams


class BestFirstParams(MethodParams):
    """Parameters."""

    length_penalty: Annotated[
        FiniteFloat,
        Field(
            ge=0.0,
            le=16.0,
            description="an answer's log-probability is divided by its length to this power; beginnings are ordered by"
            " the most that they could reach",
        ),
    ] = 0.0
    early_exit: Annotated[
        bool, Field(description="whether the first answers that come up are taken: beams may hold others")
    ] = False
    ahead: Annotated[
        int, Field(ge=1, le=64, description="hypotheses read in one batch, as they would come next; the order is kept")
    ] = 1


class BestFirstSearch(Search):
    """Beam search in another order, by paper #110 (Best-First Beam Search, Meister et al. 2020).

    Of all hypotheses the one with the best score continues, at most `width` of each length. An answer that has ended
    keeps its place at every greater length, so that what comes up at the greatest length is what a beam would hold that
    keeps answers among its hypotheses. No token raises a score, so nothing better follows.
    """

    Params = BestFirstParams
    params: BestFirstParams
    papers = (110,)

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        self._heap: list[tuple[float, int, int, Hypothesis]] = []  # -score, order, length with its padding
        self._order = count()
        self._popped = Counter[int]()
        self._following: dict[Hypothesis, list[Hypothesis]] = {}  # of those that were read and have not come up
        self._done: list[Hypothesis] = []
        return super().begin(task, models)

    def pick(self, open_: list[Hypothesis]) -> list[Hypothesis]:
        """See `Search.pick`."""
        if not self._heap and not self._popped:
            self._push(open_[0])
        waiting = (entry for entry in self._heap if self._is_waiting(entry))
        return [entry[-1] for entry in heapq.nsmallest(self.params.ahead, waiting)]

    def expand(self, read: list[Hypothesis], rows: Any) -> list[Hypothesis]:
        """See `Search.expand`."""
        found: list[Hypothesis] = []
        for each, row in zip(read, rows, strict=True):
            self._following[each] = self._continued(each, row)
            found += self._following[each]
        return found

    def _continued(self, each: Hypothesis, row: Readout) -> list[Hypothesis]:
        return super().expand([each], [row])

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        for each in candidates:
            length = each.length if each.ended else self.task.max_tokens
            each.score = each.logp / float(length) ** self.params.length_penalty
        while self._heap and len(self._done) < self.task.answers:
            _, _, length, each = entry = self._heap[0]
            if self._is_waiting(entry):
                break
            heapq.heappop(self._heap)
            if self._popped[length] >= self.task.width:
                self._following.pop(each, None)
                continue
            self._popped[length] += 1
            if not each.ended:
                for following in self._following.pop(each):
                    self._push(following)
            elif length >= self.task.max_tokens or self.params.early_exit:
                self._done.append(each)
            else:
                self._push(each, length + 1)
        self._prune()
        return Selection([entry[-1] for entry in self._heap if not entry[-1].ended], self._done)

    def _prune(self) -> None:
        """Forget what cannot come up: the places of its length are for better ones that wait."""
        places, kept = Counter(self._popped), list[tuple[float, int, int, Hypothesis]]()
        for entry in sorted(self._heap):
            places[entry[2]] += 1
            if places[entry[2]] <= self.task.width:
                kept.append(entry)
            else:
                self._following.pop(entry[3], None)
        self._heap = kept

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`."""
        return len(done) >= self.task.answers

    def best(self, open_: list[Hypothesis], done: list[Hypothesis]) -> list[Hypothesis]:
        """See `Search.best`: they came up in their order."""
        return [*done, *open_]

    def _push(self, each: Hypothesis, length: int | None = None) -> None:
        heapq.heappush(self._heap, (-each.score, next(self._order), each.length if length is None else length, each))

    def _is_waiting(self, entry: tuple[float, int, int, Hypothesis]) -> bool:
        """Whether it must be read before it comes up."""
        _, _, length, each = entry
        return not each.ended and each not in self._following and self._popped[length] < self.task.width


PART = BestFirstSearch
