"""The target's first layers and one trained layer draft; Thompson sampling says when to stop."""

from __future__ import annotations

from collections.abc import Sequence as Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from decoding.artifacts import ArtifactName
from decoding.drafters._exits import ExitDrafter, ExitParams
from decoding.drafters.base import Candidates
from decoding.exit_heads import ExitHead
from decoding.lengths.base import Round, Step
from decoding.lengths.thompson import Prior, ThompsonLength, ThompsonParams
from decoding.parts import Example, ModelShape
from decoding.sequence import Sequence
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult


class EesdParams(ExitParams):
    """Parameters of `eesd`."""

    artifact: ArtifactName = "eesd"
    control: Annotated[
        Literal["beta", "calibrated", "none"],
        Field(
            description="beta: the acceptance rate's posterior alone; calibrated: mixed with the exit layer's own"
            " confidence; none: the length policy decides"
        ),
    ] = "calibrated"
    accepted: Annotated[Prior, Field(description="the prior's count of accepted tokens")] = 1.0
    rejected: Annotated[Prior, Field(description="the prior's count of rejected tokens")] = 1.0
    half: Annotated[
        FiniteFloat,
        Field(gt=0, le=10_000, description="judged tokens after which posterior and confidence weigh the same"),
    ] = 10.0


class EesdDrafter(ExitDrafter):
    """Early exit with a sampled draft length (paper #33, EESD).

    Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism. One
    decoder layer, trained on the target's own answers, drafts behind the first layers. Before every further token its
    chance of acceptance is drawn from what this answer's rounds have shown: see `ThompsonLength`, which `thompson`
    offers to other drafters.
    """

    Params = EesdParams
    papers = (33,)
    depth = 16
    params: EesdParams

    def __init__(self, params: EesdParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        asked = self.params
        self.control: ThompsonLength | None = None
        if asked.control != "none":
            prior: dict[str, Any] = {"accepted": asked.accepted, "rejected": asked.rejected, "half": asked.half}
            # It draws whether a further token follows; the length policy says whether a round drafts at all.
            self.control = ThompsonLength(ThompsonParams(control=asked.control, abstains=False, **prior))

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        head = ExitHead(shape.width, 4, 2, shape.width // 4, inner=shape.width // 2)
        return Example(kind=cls.name, head=head, settings={"exit_layer": shape.layers // 2})

    def begin(self, model: Model, seq: Sequence) -> None:
        """See `ExitDrafter.begin`."""
        if self.control is not None:
            self.control.before_round(Round(seq, model, model, False, self.name))

    def continues(self, path: Path[Step]) -> bool:
        """One draw from the control."""
        return self.control is None or self.control.continues(path)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Update the posterior by the outcome of its own drafts, and see `ExitDrafter.observe`."""
        if self.control is not None and self._drafted and self._drafted == draft.tokens:
            self.control.observe(draft, verdict, 0.0)
        super().observe(model, seq, draft, verdict)


PART = EesdDrafter
