"""Guesses refined by the target itself: each forward judges a window of guesses and redraws what is left of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult

# Another drafter may have drawn these places in this round, with its noise: what is drawn here is judged in the next
# round, whose drafter may depend on how long this one took, and so on tokens that were drawn and never emitted.
REDRAWN = 0xFFFF  # beyond the nodes of any tree, which have lanes of their own


class JacobiParams(MethodParams):
    """Parameters of `jacobi`."""

    window: Annotated[int, Field(ge=1, le=64, description="guesses judged in a round")] = 16


class JacobiDrafter(Drafter):
    """Speculative Jacobi decoding (paper #133, Accelerating Auto-regressive Text-to-Image Generation).

    A guess that was not reached is drawn anew from the distribution the target just gave at its place, and that
    distribution is what it is judged against in the next round; a guess new to the window repeats its neighbour and
    counts as chosen. With fixed candidates the guesses are the target's own keyed samples of the round before: plain
    Jacobi iteration for greedy requests.
    """

    Params = JacobiParams
    papers = (133,)
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    depth = 64
    params: JacobiParams

    def __init__(self, params: JacobiParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        drawn = self.candidates is Candidates.DRAWN
        self.want = ReadSpec(draw=None if drawn else NoiseKind.SAMPLE, probs=drawn)
        self._guesses: list[tuple[int, torch.Tensor | None]] = []
        self._place = 0  # of the first guess, in the sequence

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain: the guesses that are left, then the last token again and again."""
        size = min(self.params.window, room.depth, room.nodes)
        guesses = self._guesses[len(seq) - self._place :][:size]
        filler = guesses[-1][0] if guesses else seq.tokens[-1]
        guesses += [(filler, None)] * (size - len(guesses))
        proposals = [proposal for _, proposal in guesses]
        drawn = self.candidates is Candidates.DRAWN
        return DraftTree.chain([token for token, _ in guesses], model.name, proposals if drawn else None)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Redraw the guesses behind the token that was emitted last."""
        if not draft.is_chain:
            self._guesses = []
            return
        root = len(seq) - len(verdict.tokens)
        rows = verdict.rows[len(verdict.path) + 1 : 1 + len(draft)]
        self._place = root + len(verdict.path) + 1
        seed = round_seed(seq.seed, root)
        self._guesses = [_redraw(row, seed, self._place + index) for index, row in enumerate(rows)]


def _redraw(row: Readout, seed: int, position: int) -> tuple[int, torch.Tensor | None]:
    if row.probs is None:
        return row.token, None
    noise = gumbel([noise_key(seed, position, Purpose.DRAFT, REDRAWN)], row.probs.numel(), row.probs.device)[0]
    return int((row.probs.log() + noise).argmax()), row.probs


PART = JacobiDrafter
