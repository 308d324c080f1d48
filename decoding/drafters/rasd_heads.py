"""Continuations retrieved from earlier text, pruned by the first of several draft heads and fused with their tree."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from decoding.artifacts import ArtifactName
from decoding.drafters._heads import HeadParams
from decoding.drafters._retrieval import Retrieval, fuse
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.drafters.medusa import MedusaDrafter, MedusaParams
from decoding.lengths.base import LengthPolicy
from decoding.model import ReadSpec
from decoding.parts import Example, ModelShape
from decoding.sequence import Sequence
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.verifiers.base import VerifyResult


class RasdHeadsParams(HeadParams):
    """Parameters of `rasd_heads`."""

    artifact: ArtifactName = "medusa"
    head_nodes: Annotated[int, Field(ge=1, le=256, description="most nodes that the heads draft")] = 24
    plausible: Annotated[
        int,
        Field(ge=1, le=64, description="retrieved paths begin with one of this number of likeliest tokens of head 1"),
    ] = 10


class RasdHeadsDrafter(Drafter):
    """RASD (paper #149, RASD: Retrieval-Augmented Speculative Decoding) with the heads of `medusa`, trained for it.

    As `rasd`, but the tree is the heads', and what the first of them finds implausible is dropped. The heads draft
    nothing in the first round of an answer, whose forward reads the prompt, and nothing is retrieved in it either.
    """

    Params = RasdHeadsParams
    papers = (149,)
    runs_on = "large"
    kinds = frozenset({Candidates.FIXED})
    depth = 16
    nodes = 60
    params: RasdHeadsParams
    want = MedusaDrafter.want

    def __init__(self, params: RasdHeadsParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._heads = MedusaDrafter(MedusaParams(artifact=self.params.artifact))
        self._retrieval = Retrieval()

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return MedusaDrafter.example(shape)

    def check(self, models: ModelPool) -> None:
        """See `MedusaDrafter.check`."""
        self._heads.where = self.where
        self._heads.check(models)
        self._heads.reads = self._heads.reads | ReadSpec(draw=None, top=self.params.plausible)

    @property
    def share(self) -> float:
        """The heads only."""
        return self._heads.share

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The heads' tree, and what was retrieved as far as there is room."""
        state = self._heads.hidden_at_end(seq)
        if state is None:
            return DraftTree.empty(model.name)
        mine = replace(room, nodes=min(room.nodes, self.params.head_nodes))
        draft, first = await self._heads.guess(model, seq, state, mine)
        plausible = {token: math.exp(logprob) for token, logprob in first.top[: self.params.plausible]}
        return fuse(draft, self._retrieval.find(model, seq, room.depth), plausible, room.nodes)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep the state the heads draft from, and a finished answer."""
        self._heads.observe(model, seq, draft, verdict)
        self._retrieval.keep(model, seq)


PART = RasdHeadsDrafter
