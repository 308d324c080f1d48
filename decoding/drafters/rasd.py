"""Continuations retrieved from earlier text, pruned by a draft model and fused with its own tree."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from decoding.draft_trees import GrowingTree, draw_without_replacement, grow_top_tree, sibling_proposals
from decoding.drafters._retrieval import Retrieval, fuse
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import Readout, ReadSpec
from decoding.noise import round_seed
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import probs_of
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult


class RasdParams(MethodParams):
    """Parameters of `rasd`."""

    model_depth: Annotated[int, Field(ge=1, le=16, description="deepest node the draft model drafts itself")] = 5
    model_nodes: Annotated[int, Field(ge=1, le=256, description="most nodes it drafts itself")] = 24
    branch: Annotated[
        int,
        Field(ge=1, le=16, description="children it considers per node; where they are drawn, children of the root"),
    ] = 4
    plausible: Annotated[
        int,
        Field(ge=1, le=64, description="retrieved paths begin with one of this number of most probable tokens"),
    ] = 10


class RasdDrafter(Drafter):
    """RASD (paper #149, RASD: Retrieval-Augmented Speculative Decoding).

    Retrieves what followed the longest suffix of the context, 16 down to 2 tokens, in this request's own text and in
    the tenant's earlier answers. Paths the draft model finds implausible at their first token are dropped, the others
    join its tree. Fixed candidates: its most probable paths. Drawn ones: children of the root drawn without
    replacement, one child below each node; the retrieved nodes come after them and count as chosen. How many are
    drawn depends on the distributions, the room, and the length policy, which is asked about the draft model's nodes
    alone: what was retrieved costs no forward.
    """

    Params = RasdParams
    papers = (149,)
    runs_on = "small"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    depth = 16
    nodes = 60
    params: RasdParams

    def __init__(self, params: RasdParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self.retrieval = Retrieval()

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The draft model's tree, and what was retrieved as far as there is room."""
        params = self.params
        mine = replace(room, depth=min(room.depth, params.model_depth), nodes=min(room.nodes, params.model_nodes))
        want = ReadSpec(draw=None, top=params.plausible)
        if self.candidates is Candidates.DRAWN:
            draft, root = await draw_tree(GrowingTree(model, seq, length), mine, params.branch, want)
        else:
            grown = await grow_top_tree(GrowingTree(model, seq, length), mine, params.branch, want)
            draft, root = grown.tree, grown.root
        plausible = {token: math.exp(logprob) for token, logprob in root.top[: params.plausible]}
        return fuse(draft, self.retrieval.find(model, seq, room.depth), plausible, room.nodes)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep a finished answer."""
        self.retrieval.keep(model, seq)


async def draw_tree(
    growing: GrowingTree, room: DraftBudget, branch: int, root_want: ReadSpec
) -> tuple[DraftTree, Readout]:
    """Chains under children of the root that are drawn without replacement; one forward a level.

    Args:
        growing: empty; its model's distributions are drawn from.
        room: where it does not do for all chains, the first go on.
        branch: children of the root.
        root_want: what else to read at the root.

    Returns:
        The tree, and what was read at the root.
    """
    want = ReadSpec(draw=None, probs=True)
    seq = growing.seq
    root = await growing.read_root(want | root_want)
    seed = round_seed(seq.seed, len(seq))
    level, rows = [ROOT], [root]
    for depth in range(room.depth):
        probs = [probs_of(row) for row in rows]
        most = min(branch, room.nodes) if depth == 0 else 1
        drawn = draw_without_replacement(probs, most, seed, len(seq) + depth, list(range(len(rows))))
        below = []
        for parent, q, draws in zip(level, probs, drawn, strict=True):
            tokens = [token for token, _ in draws]
            proposals = sibling_proposals(q, tokens)
            below += [growing.add(*child) for child in zip(tokens, [parent] * len(tokens), proposals, strict=True)]
        if depth + 1 == room.depth:
            break
        level = [node for node in below if growing.continues(node)][: room.nodes - len(growing)]
        if not level:
            break
        rows = await growing.read(level, want)
    return growing.drawn(), root


PART = RasdDrafter
