"""The near-best verifier: keep candidates the target ranks high, and at least a few tokens of every draft."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, FiniteFloat

from decoding.drafters.base import Candidates
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, fitting
from turnout.registry import MethodParams
from turnout.types import Token, TokenKind


class NearBestParams(MethodParams):
    """Parameters of `near_best`."""

    candidates: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="a token is accepted if among this many most probable; 1: the target's only",
        ),
    ] = 3
    tolerance: Annotated[
        FiniteFloat, Field(ge=0.0, le=1000.0, description="and is less probable than the best by at most this, in nats")
    ] = 1.0
    least: Annotated[
        int, Field(ge=1, le=64, description="tokens a round emits whatever the target says, where the draft has them")
    ] = 1


class NearBestVerifier(Verifier):
    """The longest path of tokens that are nearly the target's best; not lossless.

    Top-n acceptance and the minimum block of paper #53 (Blockwise Parallel Decoding), and top-beta acceptance within
    a tolerance of paper #140 (Lossless Acceleration for Seq2seq Generation, its GAD++). A candidate stays if it is
    what the target itself would choose, or among the n most probable tokens of its raw distribution and within the
    tolerance of the best. Of several longest paths the most probable one stays. The law: a round emits such a path,
    as it was proposed, then the target's own keyed sample. One candidate and a least of 1 is the match verifier.
    """

    Params = NearBestParams
    papers = (53, 140)
    lossless = False
    accepts = (Candidates.FIXED,)
    as_greedy: ClassVar[Mapping[str, Any]] = {"candidates": 1}
    params: NearBestParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self.want = ReadSpec(draw=NoiseKind.SAMPLE, top=self.params.candidates)

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`."""
        path = self._longest(seq, draft, rows)
        above = [ROOT, *path]
        tokens = [
            _token(draft.tokens[node], rows[parent + 1], draft.source, TokenKind.ACCEPTED)
            for parent, node in zip(above, path, strict=False)
        ]
        kind = TokenKind.RECOVERED if draft.children(above[-1]) else TokenKind.BONUS
        row = rows[above[-1] + 1]
        tokens.append(_token(row.token, row, target, kind))
        return VerifyResult(tuple(path), tuple(tokens))

    def _longest(self, seq: Sequence, draft: DraftTree, rows: list[Readout]) -> list[int]:
        """The longest path that stays, the most probable of several."""
        reached, fits = {ROOT: (0, 0.0)}, fitting(seq, draft)  # length and log-probability of each path
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent not in reached or not fits[node]:
                continue
            length, logprob = reached[parent]
            if length + 1 < self.params.least or self.stays(token, rows[parent + 1]):
                reached[node] = (length + 1, logprob + dict(rows[parent + 1].top).get(token, -math.inf))
        return draft.path(max(reached, key=lambda node: reached[node]))

    def stays(self, token: int, row: Readout) -> bool:
        """Return whether a candidate is near enough to what the target would choose after the row."""
        if token == row.token or self.params.candidates == 1:
            return token == row.token
        near = dict(row.top[: self.params.candidates])
        return token in near and near[token] >= row.top[0][1] - self.params.tolerance


def _token(token: int, row: Readout, source: str, kind: TokenKind) -> Token:
    logprob = row.logprob
    if logprob is not None and token != row.token:
        logprob = dict(row.top).get(token)
    return Token(token, source, kind, logprob, row.entropy_bits, row.top)


PART = NearBestVerifier
