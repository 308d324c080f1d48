"""The judge verifier: keep draft tokens that are right although the target would not have said them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat

from decoding.artifacts import ArtifactName
from decoding.drafters.base import Candidates
from decoding.model import ModelPool, NoiseKind, Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key
from decoding.parts import Example, ModelShape
from decoding.sequence import Sequence
from decoding.step_heads import StateHead
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, emitted, fitting, probs_of
from decoding.verifiers.rejection import RejectionVerifier
from turnout.registry import MethodParams
from turnout.types import Token, TokenKind

WHERE = "method.params.verifier.artifact"
LAST = -1


class JudgeParams(MethodParams):
    """Parameters of `judge`."""

    artifact: ArtifactName = "judge"
    threshold: Annotated[
        FiniteFloat, Field(ge=-1.0, le=1.0, description="probability of being right above which a token stays")
    ] = 0.5
    standard: Annotated[
        Literal["match", "rejection"],
        Field(
            description="the test a token may pass instead: equal to the target's own sample, or speculative sampling"
        ),
    ] = "match"


class JudgeVerifier(Verifier):
    """Judge decoding (paper #175): a token stays if the standard test keeps it, or a trained head says it is right.

    The head is linear and sees the target's last hidden state at the drafted token, after the target has read it.
    Where no candidate passes either, the target's own token is emitted and the round ends. Not lossless: the law is
    that of the standard test with every token the head approves of taken from the draft instead. A threshold of 1 is
    the standard verifier, one below 0 keeps every draft.
    """

    Params = JudgeParams
    papers = (175,)
    lossless = False
    accepts = (Candidates.DRAWN, Candidates.FIXED)
    as_greedy: ClassVar[Mapping[str, Any]] = {"threshold": 1.0}
    params: JudgeParams

    def __init__(self, params: JudgeParams | None = None) -> None:
        super().__init__(params)
        matches = self.params.standard == "match"
        if matches:  # drafts drawn with the target's own noise are matched more often
            self.accepts = (Candidates.FIXED, Candidates.DRAWN)  # type: ignore[misc]
        self.want = ReadSpec(draw=NoiseKind.SAMPLE if matches else None, probs=not matches, hidden=frozenset({LAST}))
        self._head: StateHead | None = None

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(kind=cls.name, head=StateHead(shape.width), roles=("small", "large"))

    def check(self, models: ModelPool) -> None:
        """Open the artifact.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        self._head = StateHead.of(models.artifacts.open(self.params.artifact, self.name, models, WHERE))

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`."""
        path: list[int] = []
        tokens: list[Token] = []
        node, fits = ROOT, fitting(seq, draft)
        while True:
            row, children = rows[node + 1], draft.children(node)
            accepted, own = self._standard(seq, draft, children, row, len(path), target)
            if accepted is None:
                accepted = next((each for each in children if fits[each] and self._right(rows[each + 1])), None)
            if accepted is None:
                tokens.append(own)
                return VerifyResult(tuple(path), tuple(tokens))
            tokens.append(emitted(draft.tokens[accepted], row, draft.source, TokenKind.ACCEPTED))
            path.append(accepted)
            node = accepted

    def _standard(
        self, seq: Sequence, draft: DraftTree, children: list[int], row: Readout, depth: int, target: str
    ) -> tuple[int | None, Token]:
        """The child the standard test keeps, if any, and the target's own token if none stays."""
        kind = TokenKind.RECOVERED if children else TokenKind.BONUS
        if self.params.standard == "match":
            match = next((child for child in children if draft.tokens[child] == row.token), None)
            return match, Token(row.token, target, kind, row.logprob, row.entropy_bits, row.top)
        position = len(seq) + depth
        accepted, residual = RejectionVerifier().choose(seq.seed, position, draft, children, probs_of(row))
        key = noise_key(seq.seed, position, Purpose.RESIDUAL)
        drawn = int((residual.log() + gumbel([key], residual.numel(), residual.device)[0]).argmax())
        return accepted, emitted(drawn, row, target, kind)

    def _right(self, row: Readout) -> bool:
        """Return whether the head approves of the token whose reading this is."""
        if self.params.threshold >= 1.0:
            return False
        if self._head is None:
            raise ValueError("the head is opened by `check`")
        return self._head.probability(row.hidden[LAST]) > self.params.threshold


PART = JudgeVerifier
