"""A chain of tokens from the model the drafter runs beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from decoding.model import Draw, Want
from decoding.sequence import Sequence
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import Verdict


class ModelChainDrafter:
    """Autoregressive draft by a small model (seed 111, Speculative decoding); one forward per token.

    The length depends on nothing that was drawn, and whatever was drawn is proposed: a draft shortened after
    looking at its tokens would bias a lossless verifier.

    Args:
        draw: `SAMPLE` draws with the noise the target itself will use, so that similar models choose the same
            token (for the match verifier); `DRAFT` draws with noise of its own and keeps each proposal
            distribution (for the rejection verifier).
    """

    name = "model_chain"

    def __init__(self, draw: Draw = Draw.SAMPLE) -> None:
        self.draw = draw

    async def propose(self, model: Model, seq: Sequence, budget: int) -> DraftTree:
        """A chain of `budget` tokens, fewer where the answer has no room for them and the target's own token."""
        keep = self.draw is Draw.DRAFT
        want = Want(draw=self.draw, probs=keep)
        path: tuple[int, ...] = ()
        proposals: list[torch.Tensor | None] = []
        for _ in range(min(budget, seq.num_remaining - 1)):
            rows = await model.extend(seq, tokens=path, want=want)
            path += (rows[-1].token,)
            proposals.append(rows[-1].probs)
        return DraftTree.chain(list(path), model.name, proposals if keep else None)

    def observe(self, seq: Sequence, draft: DraftTree, verdict: Verdict) -> None:
        """Nothing to learn."""


DRAFTER = ModelChainDrafter
