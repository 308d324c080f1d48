"""A tree grown where the draft model expects the verifier to come by."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.draft_trees import PROBS, GrowingTree, draw_without_replacement, sibling_proposals
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.noise import round_seed
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import probs_of
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model


class DySpecParams(MethodParams):
    """Parameters of `dyspec`."""

    threshold: Annotated[
        float, Field(ge=0.0, le=1.0, description="draws less likely to be reached by the verifier are not made")
    ] = 0.01


@dataclass(frozen=True, slots=True)
class DrawValues:
    """Expected values of a draw.

    Attributes:
        reached: that the verifier comes to judge it, if target and draft agree: known before it is drawn.
        accepted: that it takes it.
    """

    reached: float
    accepted: float


class DySpecDrafter(Drafter):
    """Greedy growth by residual draft probability (paper #51, DySpec: Faster Speculative Decoding with Dynamic Token
    Tree Structure).

    The draft is that of the heap that always makes the draw with the highest probability of being reached. That
    probability never rises from a draw to its next sibling or to its children, so whole levels can be drawn and fed
    together: a draw outside the best so far is not among the best at the end, nor does it change which are.
    """

    Params = DySpecParams
    papers = (51,)
    runs_on = "small"
    kinds = frozenset({Candidates.DRAWN})
    stepwise = True
    depth = 12
    nodes = 48
    params: DySpecParams

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The tree, in draw order."""
        return await grow_by_value(GrowingTree(model, seq, length), room, self.params.threshold)


async def grow_by_value(growing: GrowingTree, room: DraftBudget, threshold: float) -> DraftTree:
    """Draw where the verifier is most expected, one forward a level; see `DySpecDrafter`.

    Args:
        growing: empty. Below a node its length policy stops at nothing is drawn, and others have the room.
        room: deepest node, and most draws.
        threshold: least probability of being reached.
    """
    seq = growing.seq
    seed = round_seed(seq.seed, len(seq))
    values: list[DrawValues] = []
    read: dict[int, torch.Tensor] = {}
    best: list[int] = []
    cut = threshold
    level, rows = [ROOT], [await growing.read_root(PROBS)]
    for depth in range(1, room.depth + 1):
        probs = [probs_of(row) for row in rows]
        read.update(zip(level, probs, strict=True))
        lanes = [node + 1 for node in level]
        drawn = draw_without_replacement(probs, room.nodes, seed, len(seq) + depth - 1, lanes)
        for parent, draws in zip(level, drawn, strict=True):
            start = 1.0 if parent == ROOT else values[parent].accepted
            for token, value in zip((token for token, _ in draws), value_draws(start, draws), strict=False):
                if value.reached < cut:
                    break
                growing.add(token, parent)
                values.append(value)
        best = heapq.nsmallest(room.nodes, range(len(values)), key=lambda node: (-values[node].reached, node))
        cut = values[best[-1]].reached if len(best) == room.nodes else threshold
        if depth == room.depth:
            break
        level = sorted(node for node in best if growing.depths[node] == depth and values[node].accepted >= cut)
        level = [node for node in level if growing.continues(node)]
        if not level or not growing.has_room(len(level)):
            break
        rows = await growing.read(level, PROBS)
    return _with_proposals(growing, sorted(best), read)


def value_draws(start: float, draws: list[tuple[int, float]]) -> list[DrawValues]:
    """Values of draws without replacement at one node.

    Args:
        start: probability that the verifier reaches the node.
        draws: tokens in draw order with their probabilities before any was drawn.
    """
    values = []
    reached, left = start, 1.0
    for _, chance in draws:
        if reached <= 0.0 or left <= 0.0:
            break
        share = min(chance / left, 1.0)
        values.append(DrawValues(reached, reached * share))
        reached, left = reached * (1.0 - share), left - chance
    return values


def _with_proposals(growing: GrowingTree, nodes: list[int], read: dict[int, torch.Tensor]) -> DraftTree:
    siblings: dict[int, list[int]] = {}
    for node in nodes:
        siblings.setdefault(growing.parents[node], []).append(node)
    proposals: dict[int, torch.Tensor] = {}
    for parent, group in siblings.items():
        tokens = [growing.tokens[node] for node in group]
        proposals.update(zip(group, sibling_proposals(read[parent], tokens), strict=True))
    return growing.some(nodes, tuple(proposals[node] for node in nodes))


PART = DySpecDrafter
