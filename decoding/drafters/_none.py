"""No draft at all: the arm of plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.sequence import Sequence
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model


class NoDrafter(Drafter):
    """Drafter of empty drafts, without a replacement: a selector takes it where speculation does not pay."""

    kinds = frozenset(Candidates)
    abstains = True

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """Nothing."""
        return DraftTree.empty(model.name)
