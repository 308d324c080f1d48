"""The length slot: how deep a draft may go, decided before a round and after each of its tokens.

A module here assigns its class to `PART`; requests choose it by file name. A policy never sees a token that it could
take away again: once drafted, a token is verified.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Path
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from decoding.model import Readout, ReadSpec
from decoding.parts import Part
from decoding.state import Stateful
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Busy, Model
    from decoding.sequence import Sequence
    from decoding.tree import DraftTree
    from decoding.verifiers.base import VerifyResult

PACKAGE = "decoding.lengths"

Depth = Annotated[int, Field(ge=1, le=64, description="deepest draft, tokens")]


class LengthParams(MethodParams):
    """Parameters of every policy: the depth bound."""

    most: Depth = 16


@dataclass(frozen=True, slots=True)
class Step:
    """Drafted token, and the row it was chosen from: the draft model's reading before the token."""

    token: int
    row: Readout


@dataclass(frozen=True)
class Round:
    """Round of speculation, as known before it.

    Attributes:
        seq: the sequence.
        draft: the model that drafts, or the target where the drafter needs none.
        target: the model that verifies.
        free: whether drafting costs no forward pass.
        drafter: the drafter and its parameters; equal for those that draft alike.
        share: cost of a drafted level as a share of a forward of `draft`, unless drafting is free.
        judge: the verifier, and whether tokens are drawn.
        width: nodes that a draft may have for each of its levels.
        predicted_s: what `target_s` said so far, by tokens; for all rounds of one moment.
    """

    seq: Sequence
    draft: Model
    target: Model
    free: bool
    drafter: str
    share: float = 1.0
    judge: str = ""
    width: float = 1.0
    predicted_s: dict[float, float] = field(default_factory=dict, repr=False, compare=False)

    def draft_s(self, width: float = 1.0) -> float:
        """Return the predicted wall time of drafting a level, in seconds; 0.0 if it is unknown, or drafting is free.

        Args:
            width: nodes of a level, all read in one forward.
        """
        if self.free:
            return 0.0
        if width not in self._level_s:
            self._level_s[width] = self.share * step_seconds(self.draft, self.draft.busy(), len(self.seq), width)
        return self._level_s[width]

    @cached_property
    def entry_s(self) -> float:
        """Predicted wall time of reading the sequence for a first draft, in seconds; 0.0 where drafting is free."""
        length = len(self.seq)
        return 0.0 if self.free else self.share * self.draft.forward_seconds(length, length * (length + 1) // 2, 1)

    def target_s(self, tokens: float) -> float:
        """Return the predicted wall time of verification with `tokens` fed for each sequence, in seconds."""
        if tokens not in self.predicted_s:
            self.predicted_s[tokens] = step_seconds(self.target, self._busy, len(self.seq), tokens)
        return self.predicted_s[tokens]

    @property
    def sequences(self) -> int:
        """Number of sequences that the target works on, this one included."""
        return max(self._busy.sequences, 1)

    @cached_property
    def _busy(self) -> Busy:
        return self.target.busy()

    @cached_property
    def _level_s(self) -> dict[float, float]:
        return {}


def step_seconds(model: Model, busy: Busy, context: int, tokens: float) -> float:
    """Return the predicted wall time of one forward over all sequences a model holds, in seconds.

    Args:
        model: the model.
        busy: its current work.
        context: tokens of the asking sequence, which the model may not hold yet.
        tokens: fed to each sequence.
    """
    sequences = max(busy.sequences, 1)
    cached = max(busy.cached_tokens, context)
    fed = round(sequences * tokens)
    return model.forward_seconds(fed, round(cached * tokens + fed * (tokens + 1.0) / 2.0), sequences)


class LengthPolicy(Part, Stateful):
    """Length policy: limit of a draft's depth.

    It belongs to the caller: `before_round` and `observe` run there, and `continues` next to the draft model, with what
    `changing` names.

    Attributes:
        stepwise: whether `continues` looks at tokens, so that only stepwise drafters fit.
        abstains: whether it may choose that nothing is drafted.
        want: what the draft model must read with each drafted token.
        wanted_rounds: rounds of this answer in which it wanted a draft because one is expected to pay.
    """

    Params: ClassVar[type[LengthParams]] = LengthParams
    stepwise: ClassVar[bool] = False
    abstains: ClassVar[bool] = False
    params: LengthParams
    where: str = "method.params.length"
    want: ReadSpec = ReadSpec(draw=None)
    wanted_rounds: int = 0

    def check_draft(self, model: Model) -> None:
        """Refuse the model that is to draft, before the first token.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the policy was made for another one.
        """

    def share_risk(self, num_arms: int) -> None:
        """Take on one of `num_arms` equal parts of what drafts may lose: others of the same answer have the rest."""

    def promise(self, round: Round) -> float:
        """Return the expected tokens per second of a round with a draft, over plain decoding's; 1.0 where unknown."""
        return 1.0

    def before_round(self, round: Round) -> int:
        """Return the depth of the coming round's deepest draft; 0: decode plainly."""
        return self.params.most

    def defer(self) -> None:
        """Defer drafting: no drafter has a draft; the target decodes plainly until one may have, or for a while."""

    def continues(self, path: Path[Step]) -> bool:
        """Return whether to draft on below a token.

        Args:
            path: the tokens drafted from the root down to it, at least one.
        """
        return True

    def observe_untried(self, draft: DraftTree, verdict: VerifyResult) -> None:
        """Observe what the target would have made of a draft that it decoded plainly instead of.

        Args:
            draft: a chain that a free drafter would have proposed, not longer than what was decoded.
            verdict: the tokens accepted, and the next one.
        """

    @abstractmethod
    def observe(self, draft: DraftTree, verdict: VerifyResult, seconds: float) -> None:
        """Observe the outcome of a round for which the policy was asked.

        Args:
            draft: the proposal of its drafter; empty if there was none, also if another's draft was verified.
            verdict: the outcome of the round, by any drafter; of a stretch without drafts, its tokens.
            seconds: wall time of draft and verification, less what the target read of prompts meanwhile, its own too;
                0.0 where another's draft was verified.
        """
