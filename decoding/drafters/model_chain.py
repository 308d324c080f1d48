"""A chain of tokens from the model that the drafter runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import NoiseKind, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model


class ModelChainDrafter(Drafter):
    """Autoregressive draft by a small model (paper #111, Speculative decoding); one forward per token.

    Fixed candidates are drawn with the noise the target itself will use, so that similar models choose the same
    token (for the match verifier); drawn ones with noise of their own, each proposal distribution kept.

    Attributes:
        draw: with which noise candidates are drawn. Who drafts a round, and how deep, may depend on tokens that the
            rounds before drafted behind a rejection: their places are drawn again with other noise.
        after: hypothetical tokens between the sequence and the draft.
    """

    papers: ClassVar[tuple[int, ...]] = (111,)
    runs_on = "small"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    changing: ClassVar[tuple[str, ...]] = ("after",)
    draw: NoiseKind = NoiseKind.ROUND
    after: tuple[int, ...] = ()

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain, as deep as there is room; it ends where the policy stops it, or with an end of the answer."""
        drawn = self.candidates is Candidates.DRAWN
        want = ReadSpec(draw=self.draw if drawn else NoiseKind.SAMPLE, probs=drawn) | length.want
        path: list[Step] = []
        while len(path) < min(room.depth, room.nodes):
            [row] = await model.extend(seq, tokens=(*self.after, *(step.token for step in path)), want=want)
            path.append(Step(row.token, row))
            if row.token in seq.end_ids or not length.continues(path):
                break
        proposals: list[torch.Tensor | None] = [step.row.probs for step in path]
        return DraftTree.chain([step.token for step in path], model.name, proposals if drawn else None)


PART = ModelChainDrafter
