"""The most probable paths under the model that the drafter runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from decoding.draft_trees import GrowingTree, grow_top_tree
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model


class ModelTreeParams(MethodParams):
    """Parameters of `model_tree`."""

    branch: Annotated[int, Field(ge=1, le=64, description="children considered per node")] = 8


class ModelTreeDrafter(Drafter):
    """The nodes with the highest path probability (paper #56, Accelerating LLM Inference with Staged Speculative
    Decoding, its tree alone); one forward a level.
    """

    Params = ModelTreeParams
    papers = (56,)
    runs_on = "small"
    kinds = frozenset({Candidates.FIXED})
    stepwise = True
    depth = 8
    nodes = 32
    params: ModelTreeParams

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The tree, best node first."""
        return (await grow_top_tree(GrowingTree(model, seq, length), room, self.params.branch)).tree


PART = ModelTreeDrafter
