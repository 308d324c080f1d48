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
    """How proposed tokens came about, which decides what verifiers may make of them.

    fixed: chosen, not drawn: the most probable ones, a copy, a lookup. drawn: drawn from the distribution that is
    stored with each, the later siblings without the earlier ones, with noise of their own. sequences: whole
    sequences drawn independently of each other, `DraftTree.sequences`.
    """

    FIXED = "fixed"
    DRAWN = "drawn"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How large a draft may be: its deepest node, and its number of nodes, extra rows included. Both at least 1.

    Attributes:
        sequences: that the target works on, this one included: what a node costs depends on them.
    """

    depth: int
    nodes: int
    sequences: int = 1


class Drafter(Part, Stateful):
    """Proposes continuations. One drafter serves one request; a remote model works with a copy of it.

    The copy keeps what it learns in attributes of its own, next to the model. Only `changing` goes to the caller: what
    `want`, `share` and `note` follow from, for example.

    What was drawn is proposed, in draw order, and whether another candidate is drawn is decided before it is
    seen: a draft shortened or sorted after looking at its tokens would bias a lossless verifier.

    Attributes:
        runs_on: the model it runs next to, by role; "any" where it needs none.
        kinds: candidates it can make.
        stepwise: whether it asks the length policy before it goes on below a token.
        abstains: whether its turn is a round without a draft: nobody is asked in its place.
        watches: whether `ready` tells when it has something to propose, so that it need not be asked before.
        want: what the target reads for it at the root, every node and every extra row of the coming round.
        depth: deepest draft unless the request says otherwise; None: what the length policy has as its own limit.
        nodes: nodes of a draft unless the request says otherwise; None: as many as it is deep.
    """

    runs_on: ClassVar[Literal["small", "large", "any"]] = "any"
    kinds: ClassVar[frozenset[Candidates]] = frozenset({Candidates.FIXED})
    stepwise: ClassVar[bool] = False
    abstains: ClassVar[bool] = False
    watches: ClassVar[bool] = False
    depth: ClassVar[int | None] = None
    nodes: ClassVar[int | None] = None
    where: str = FIELD
    want: ReadSpec = NOTHING

    def __init__(self, params: Any = None, candidates: Candidates | None = None) -> None:
        super().__init__(params)
        self.candidates = candidates or next(kind for kind in Candidates if kind in self.kinds)

    @classmethod
    def inside(cls, params: Any, where: str = FIELD) -> type[Drafter]:
        """Whose kinds, steps and sizes hold: its own, or those of a drafter that these parameters put into it.

        Args:
            params: its own.
            where: which field of the request says them, for refusals.
        """
        return cls

    @property
    def share(self) -> float:
        """How much of a forward of the model it runs beside a drafted level takes; 0.0: drafting needs none."""
        return 0.0 if self.runs_on == "any" else 1.0

    @property
    def note(self) -> str:
        """What the finished answer is to say of its drafts; empty: nothing."""
        return ""

    def check_room(self, room: DraftBudget, field: str) -> None:
        """Refuse drafts as large as a request's may become, before the first token.

        Args:
            room: the largest.
            field: that a refusal names: it says how many nodes.

        Raises:
            TurnoutError: INVALID_ARGUMENT.
        """

    @abstractmethod
    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A draft under the sequence's last token; may be empty.

        Args:
            model: the one it runs beside.
            seq: what to continue.
            room: how large it may be.
            length: asked before going on below a token, by stepwise drafters.
        """

    def ready(self, seq: Sequence, token: int) -> bool:
        """Whether it has something to propose behind a token that is about to be appended.

        Asked for each one while the target decodes because nobody had anything to propose: a matter of microseconds.
        """
        return True

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """What became of a round, its draft being this drafter's or another's; `seq` has the emitted tokens.

        Args:
            model: the one it runs beside.
            seq: what was continued.
            draft: what was verified.
            verdict: the outcome; `verdict.rows` are what the target read.
        """
