"""Beams of a small recurrent head on the target's last hidden state, merged into a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.artifacts import ArtifactName
from decoding.drafters._heads import HeadDrafter, HeadParams
from decoding.drafters.base import Candidates, DraftBudget
from decoding.heads import RecurrentHead
from decoding.parts import Example, ModelShape
from decoding.sequence import Sequence
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model

KEPT = 50


class ReDrafterParams(HeadParams):
    """Parameters of `redrafter`."""

    artifact: ArtifactName = "redrafter"
    width: Annotated[int, Field(ge=1, le=64, description="beams")] = 10


def search_beams(
    head: RecurrentHead,
    embed: Callable[[list[int]], torch.Tensor],
    hidden: torch.Tensor,
    pending: int,
    width: int,
    length: int,
) -> list[list[int]]:
    """The most probable continuations that a beam search finds, best first.

    At each beam the `KEPT` most probable tokens count, their probabilities renormalised.

    Args:
        head: the recurrent head.
        embed: token ids [n] -> float32 [n, width of the head].
        hidden: float32 [width of the head], the same at every step.
        pending: the token to continue.
        width: beams; the first step grows them all from one.
        length: tokens of each.
    """
    states, scores = head.start(1), torch.zeros(1)
    tokens = [pending]
    beams: list[list[int]] = [[]]
    for _ in range(length):
        states = head.advance(states, embed(tokens))
        logits = head.logits(hidden.expand_as(states), states)
        kept = logits.topk(min(KEPT, logits.shape[-1]), dim=-1)
        totals = (scores[:, None] + kept.values.log_softmax(-1)).flatten()
        scores, places = totals.topk(min(width, len(totals)))
        origins = places // kept.indices.shape[1]
        tokens = kept.indices.flatten()[places].tolist()
        beams = [[*beams[origin], token] for origin, token in zip(origins.tolist(), tokens, strict=True)]
        states = states[origins]
    return beams


class ReDrafterDrafter(HeadDrafter[RecurrentHead]):
    """ReDrafter (paper #115, Recurrent Drafter for Fast Speculative Decoding in Large Language Models).

    Beams are chosen, not drawn: their probabilities are no proposals, and the match verifier judges the merged tree.
    A smaller room keeps the most probable beams.
    """

    Params = ReDrafterParams
    network = RecurrentHead
    papers = (115,)
    kinds = frozenset({Candidates.FIXED})
    depth = 5
    nodes = 50
    params: ReDrafterParams

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(kind=cls.name, head=RecurrentHead(shape.width, shape.vocab_size))

    @property
    def share(self) -> float:
        """Its own network only."""
        return 0.0

    async def draft(self, model: Model, seq: Sequence, hidden: torch.Tensor, room: DraftBudget) -> DraftTree:
        """The beams, as deep as there is room, equal beginnings merged."""
        beams = search_beams(self.head, model.embed, hidden, seq.tokens[-1], self.params.width, room.depth)
        return DraftTree.merged(beams, room.nodes, model.name)


PART = ReDrafterDrafter
