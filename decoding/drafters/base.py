"""The drafter slot: propose a tree of tokens, learn from what became of it.

A module here assigns its class to `PART`; requests choose it by file name.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from decoding.lengths.base import LengthPolicy
from decoding.model import ReadSpec
from decoding.parts import Part
from decoding.sequence import Sequence
from decoding.state import Stateful
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult

PACKAGE = "decoding.drafters"
FIELD = "method.params.drafter"
NOTHING = ReadSpec(draw=None)


class Candidates(StrEnum):
    """Kind of the proposed tokens: how they were chosen, which decides how verifiers may judge them.

    fixed: chosen, not drawn: the most probable ones, a copy, a lookup. drawn: drawn from the distribution that is
    stored with each, the later siblings without the earlier ones, with noise of their own. sequences: whole
    sequences drawn independently of each other, `DraftTree.sequences`.
    """

    FIXED = "fixed"
    DRAWN = "drawn"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Largest draft: its deepest node, and its number of nodes, extra rows included. Both at least 1.

    Attributes:
        sequences: number that the target works on, this one included; the cost of a node depends on it.
    """

    depth: int
    nodes: int
    sequences: int = 1


class Drafter(Part, Stateful):
    """Drafter of continuations. One drafter serves one request; a remote model works with a copy of it.

    The copy keeps what it learns in attributes of its own, next to the model. Only `changing` is returned to the
    caller: for example, the values that `want`, `share` and `note` follow from.

    Drawn tokens are proposed, in draw order, and the decision to draw another candidate is made before it is
    seen: a draft shortened or sorted after looking at its tokens would bias a lossless verifier.

    Attributes:
        runs_on: the model it runs next to, by role; "any" where it needs none.
        kinds: candidates it can make.
        stepwise: whether it asks the length policy before it continues below a token.
        abstains: whether its turn is a round without a draft: no other drafter is asked in its place.
        watches: whether `ready` reports when it has something to propose, so that it need not be asked before.
        across_vocabularies: whether it can run next to a model with another vocabulary than the target's.
        want: what the target reads for it at the root, every node and every extra row of the coming round.
        depth: deepest draft unless the request says otherwise; None: what the length policy has as its own limit.
        nodes: nodes of a draft unless the request says otherwise; None: equal to its depth.
    """

    runs_on: ClassVar[Literal["small", "large", "any"]] = "any"
    kinds: ClassVar[frozenset[Candidates]] = frozenset({Candidates.FIXED})
    stepwise: ClassVar[bool] = False
    abstains: ClassVar[bool] = False
    watches: ClassVar[bool] = False
    across_vocabularies: ClassVar[bool] = False
    depth: ClassVar[int | None] = None
    nodes: ClassVar[int | None] = None
    where: str = FIELD
    want: ReadSpec = NOTHING

    def __init__(self, params: Any = None, candidates: Candidates | None = None) -> None:
        super().__init__(params)
        self.candidates = candidates or next(kind for kind in Candidates if kind in self.kinds)

    @classmethod
    def inside(cls, params: Any, where: str = FIELD) -> type[Drafter]:
        """Return the class whose kinds, steps and sizes hold: this one, or that of a drafter its parameters wrap.

        Args:
            params: its own.
            where: field of the request that gives them, for error messages.
        """
        return cls

    @property
    def share(self) -> float:
        """Cost of a drafted level, as a share of a forward of the model in `runs_on`; 0.0: drafting needs none."""
        return 0.0 if self.runs_on == "any" else 1.0

    @property
    def note(self) -> str:
        """Note on the drafts for the finished answer; empty: none."""
        return ""

    def check_room(self, room: DraftBudget, field: str) -> None:
        """Refuse drafts as large as a request's may become, before the first token.

        Args:
            room: the largest.
            field: the field of the number of nodes, which an error names.

        Raises:
            TurnoutError: INVALID_ARGUMENT.
        """

    @abstractmethod
    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """Propose a draft under the sequence's last token; may be empty.

        Args:
            model: the one it runs next to.
            seq: the sequence to continue.
            room: the largest draft.
            length: asked by stepwise drafters before they continue below a token.
        """

    def ready(self, seq: Sequence, token: int) -> bool:
        """Return whether it has something to propose after a token that is about to be appended.

        Called for each token while the target decodes because no drafter had a proposal: must take microseconds.
        """
        return True

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Observe the outcome of a round, its draft being this drafter's or another's; `seq` has the emitted tokens.

        Args:
            model: the one it runs next to.
            seq: the sequence that was continued.
            draft: the verified draft.
            verdict: the outcome; `verdict.rows` are the target's readings.
        """
