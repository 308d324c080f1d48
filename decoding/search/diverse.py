"""Diverse beam search: groups of beams, each kept away from the tokens that those before it chose at the same step."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from decoding.model import ModelPool
from decoding.search._beams import Beam, BeamParams
from decoding.search.base import Hypothesis, Search, SearchTask, Selection, ordered
from turnout.errors import invalid
from turnout.types import MOST_WIDTH


class DiverseParams(BeamParams):
    """Parameters."""

    groups: Annotated[
        int | None, Field(ge=1, le=MOST_WIDTH, description="groups, which divide the width; absent: as many as beams")
    ] = None
    diversity: Annotated[
        FiniteFloat, Field(ge=0.0, le=1e4, description="nats for each hypothesis of groups before that chose the token")
    ] = 0.5


class DiverseBeamSearch(Search):
    """Groups of beams that differ, by paper #64 (Vijayakumar et al. 2016) with the Hamming penalty.

    At each step the groups follow in order; in a group a token counts `diversity` less for each time that earlier
    groups chose it at this step, tokens that end included. The penalty decides what is chosen and is not carried on:
    answers are ordered by their log-probability under the length penalty. A group has a width and an end of its own.
    """

    Params = DiverseParams
    params: DiverseParams
    papers = (64,)

    def begin(self, task: SearchTask, models: ModelPool) -> Any:
        """See `Search.begin`."""
        groups = self.params.groups or task.width
        if task.width % groups:
            raise invalid(f"{self.where}.groups", f"must divide the width, {task.width} (got {groups})")
        self._groups = [Beam(task, task.width // groups, self.params) for _ in range(groups)]
        self._first = True
        super().begin(task, models)
        return -1  # the prompt belongs to all groups

    def select(self, candidates: list[Hypothesis], open_: list[Hypothesis], done: list[Hypothesis]) -> Selection:
        """See `Search.select`."""
        taken = Counter[int]()
        for index, group in enumerate(self._groups):
            if not self._first and group.finished:
                group.open = []
                continue
            own = [_of_group(each, index) for each in candidates if each.parent and each.parent.state in (-1, index)]
            own.sort(key=lambda each: taken[each.token] * self.params.diversity - each.score)
            taken.update([each.token for each in group.advance(own)])
        self._first = False
        found = [each for group in self._groups for each in group.done]
        return Selection([each for group in self._groups for each in group.open], ordered(found))

    def finished(self, open_: list[Hypothesis], done: list[Hypothesis]) -> bool:
        """See `Search.finished`."""
        return all(group.finished for group in self._groups)

    def best(self, open_: list[Hypothesis], done: list[Hypothesis]) -> list[Hypothesis]:
        """See `Search.best`."""
        return [*done, *ordered(open_)]


def _of_group(each: Hypothesis, group: int) -> Hypothesis:
    """A continuation as a group's own: of the prompt all groups have the same."""
    return Hypothesis(each.parent, each.token, each.logp, each.length, each.logp, group, each.ended, each.row)


PART = DiverseBeamSearch
