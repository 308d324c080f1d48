"""The length slot: how deep a draft may go, decided before a round and after each of its tokens.

A module here assigns its class to `PART`; requests choose it by file name. A policy never sees a token that it could
take away again: once drafted, a token is verified.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Path
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from decoding.model import Row, Want
from decoding.parts import Part
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.sequence import Sequence
    from decoding.tree import DraftTree
    from decoding.verifiers.base import Verdict

PACKAGE = "decoding.lengths"

Depth = Annotated[int, Field(ge=1, le=64, description="deepest draft, tokens")]


class LengthParams(MethodParams):
    """What every policy is bounded by."""

    most: Depth = 16


@dataclass(frozen=True, slots=True)
class Step:
    """A drafted token, and the row it was chosen from: the draft's reading before the token."""

    token: int
    row: Row


@dataclass(frozen=True, slots=True)
class Round:
    """What is known before a round.

    Attributes:
        seq: the sequence.
        draft: the model that drafts, or the target where the drafter needs none.
        target: the model that verifies.
        free: whether drafting costs no forward pass.
        drafter: name of the drafter.
    """

    seq: Sequence
    draft: Model
    target: Model
    free: bool
    drafter: str


class LengthPolicy(Part):
    """Says how deep a draft may go.

    Attributes:
        stepwise: whether `goes_on` looks at tokens, so that only stepwise drafters fit.
        want: what the draft model must read with each drafted token.
    """

    Params: ClassVar[type[LengthParams]] = LengthParams
    stepwise: ClassVar[bool] = False
    params: LengthParams
    want: Want = Want(draw=None)

    def before_round(self, round: Round) -> int:
        """Deepest draft of the coming round; 0: decode plainly."""
        return self.params.most

    def goes_on(self, path: Path[Step]) -> bool:
        """Whether to draft on below a token, at least one long.

        Args:
            path: the tokens drafted from the root down to it.
        """
        return True

    @abstractmethod
    def observe(self, draft: DraftTree, verdict: Verdict, seconds: float) -> None:
        """What became of a round for which it was asked: the wall time of draft and verification in seconds."""
