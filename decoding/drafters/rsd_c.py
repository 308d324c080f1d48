"""A tree with as many children for every node of a level, drawn without replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from decoding.draft_trees import GrowingTree, grow_planned
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.tree_plans import branching_plan
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model

Children = Literal[1, 2, 3, 4, 5, 6, 7, 8]


class RsdCParams(MethodParams):
    """Parameters of `rsd_c`."""

    branching: Annotated[
        tuple[Children, ...],
        Field(min_length=1, max_length=16, description="children of the root, of each node below it, and so on"),
    ] = (3, 2, 1, 1)


class RsdCDrafter(Drafter):
    """Constant branching, siblings by Gumbel-top-k (paper #80, Recursive Speculative Decoding).

    Where a node has fewer possible tokens than children (a greedy request: one), it has as many children as those.
    """

    Params = RsdCParams
    papers = (80,)
    runs_on = "small"
    kinds = frozenset({Candidates.DRAWN})
    stepwise = True
    depth = 16
    nodes = 64
    params: RsdCParams

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The tree; nodes it has no room for are those of the last level."""
        plan = branching_plan(self.params.branching[: room.depth], room.nodes)
        return await grow_planned(GrowingTree(model, seq, length), plan)


PART = RsdCDrafter
