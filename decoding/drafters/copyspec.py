"""Copies what followed the last few tokens when they stood in the conversation before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.ngrams import GramIndex
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model


class CopySpecParams(MethodParams):
    """Parameters of `copyspec`."""

    gamma: Annotated[int, Field(ge=1, le=16, description="tokens that must have stood there before")] = 4
    occurrence: Annotated[
        Literal["first", "last"], Field(description="which of several earlier places is copied from")
    ] = "last"


class CopySpecDrafter(Drafter):
    """CopySpec (paper #141, CopySpec: Accelerating LLMs with Speculative Copy-and-Paste).

    Looks in the prompt, earlier turns included, and in the answer so far. Where the last tokens are new it proposes
    nothing, and the next of a request's drafters is asked: list it first, with `select` "first". The paper copies from
    the first place; the last one, nearer to what is being written, needs fewer rounds on source code and its edits.
    """

    Params = CopySpecParams
    papers = (141,)
    watches = True
    depth = 32
    params: CopySpecParams

    def __init__(self, params: CopySpecParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._index = GramIndex(self.params.gamma, latest=self.params.occurrence == "last")

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain: what stands behind the earlier place, up to the sequence's end."""
        start = self._index.find(seq.tokens)
        if start is None:
            return DraftTree.empty(model.name)
        start += self.params.gamma
        return DraftTree.chain(seq.tokens[start : start + min(room.depth, room.nodes)], model.name)

    def ready(self, seq: Sequence, token: int) -> bool:
        """Return whether the last tokens, this one included, stood there before."""
        return self._index.find(seq.tokens, token) is not None


PART = CopySpecDrafter
