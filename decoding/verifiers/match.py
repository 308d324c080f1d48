"""The match verifier: emit the target's own keyed sample, as far as the draft foresaw it."""

from __future__ import annotations

from decoding.drafters.base import Candidates
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import Verifier, VerifyResult
from turnout.types import Token, TokenKind


class MatchVerifier(Verifier):
    """Follow the child that equals the target's own sample; where there is none, emit the sample and stop.

    Every emitted token is the target's sample under noise keyed by position, so the output equals plain decoding
    with the same seed token by token, whatever drafted. Papers #111 (Speculative decoding) and the coupling of
    keyed noise.
    """

    papers = (111,)
    lossless = True
    resumable = True
    accepts = (Candidates.FIXED, Candidates.DRAWN, Candidates.SEQUENCES)
    want = ReadSpec(draw=NoiseKind.SAMPLE)

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`."""
        path: list[int] = []
        tokens: list[Token] = []
        node = ROOT
        while True:
            row = rows[node + 1]
            children = draft.children(node)
            match = next((child for child in children if draft.tokens[child] == row.token), None)
            if match is None:
                kind = TokenKind.RECOVERED if children else TokenKind.BONUS
                tokens.append(_token(row, target, kind))
                return VerifyResult(tuple(path), tuple(tokens))
            tokens.append(_token(row, draft.source, TokenKind.ACCEPTED))
            path.append(match)
            node = match


def _token(row: Readout, source: str, kind: TokenKind) -> Token:
    return Token(row.token, source, kind, row.logprob, row.entropy_bits, row.top)


PART = MatchVerifier
