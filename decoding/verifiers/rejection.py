"""The rejection verifier: accept sampled candidates against the distribution each was drawn from."""

from __future__ import annotations

import torch

from decoding.drafters.base import Candidates
from decoding.model import Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, uniform
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, emitted, probs_of
from turnout.types import Token, TokenKind


class RejectionVerifier(Verifier):
    """Recursive rejection sampling over a tree, in draw order; the emitted tokens follow the target's law exactly.

    At a node the target's distribution is the first residual R. A child with token x drawn from q is accepted with
    probability min(1, R[x] / q[x]); otherwise R becomes norm((R - q)+). If every child is rejected, the token is
    drawn from R. A chain is the rule of paper #111 (Speculative decoding); a child without a proposal counts as
    drawn from a one-hot distribution. Greedy requests are the one-hot limit: then a child is accepted when it is
    the target's arg-max.

    Attributes:
        open_end: emit nothing where the path ends in a leaf: the caller has another candidate there and judges it.
    """

    papers = (111, 80)
    lossless = True
    accepts = (Candidates.DRAWN, Candidates.FIXED)
    want = ReadSpec(draw=None, probs=True)
    open_end: bool = False

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`."""
        path: list[int] = []
        tokens: list[Token] = []
        node = ROOT
        while True:
            children = draft.children(node)
            if self.open_end and not children:
                return VerifyResult(tuple(path), tuple(tokens))
            row = rows[node + 1]
            position = len(seq) + len(path)
            accepted, residual = self.choose(seq.seed, position, draft, children, probs_of(row))
            if accepted is None:
                key = noise_key(seq.seed, position, Purpose.RESIDUAL)
                drawn = int((residual.log() + gumbel([key], residual.numel(), residual.device)[0]).argmax())
                tokens.append(emitted(drawn, row, target, TokenKind.RECOVERED if children else TokenKind.BONUS))
                return VerifyResult(tuple(path), tuple(tokens))
            tokens.append(emitted(draft.tokens[accepted], row, draft.source, TokenKind.ACCEPTED))
            path.append(accepted)
            node = accepted

    def choose(
        self, seed: int, position: int, draft: DraftTree, children: list[int], residual: torch.Tensor
    ) -> tuple[int | None, torch.Tensor]:
        """The accepted child, if any, and what is left of the target's distribution (float32 [vocab])."""
        for rank, child in enumerate(children):
            token, proposal = draft.tokens[child], draft.proposal(child)
            drawn_with = 1.0 if proposal is None else float(proposal[token])
            # Strict, and u < 1: a ratio of one always accepts, a probability of zero never does.
            if uniform(noise_key(seed, position, Purpose.ACCEPT, rank)) * drawn_with < float(residual[token]):
                return child, residual
            residual = subtract(residual, token, proposal)
        return None, residual


def subtract(residual: torch.Tensor, token: int, proposal: torch.Tensor | None) -> torch.Tensor:
    """norm((residual - proposal)+), float32 [vocab]; proposal None is one-hot at `token`.

    Where rounding leaves nothing (the two agreed, and a rejection had probability zero), `residual` stays.
    """
    if proposal is None:
        left = residual.clone()
        left[token] = 0.0
    else:
        left = (residual - proposal.to(residual.device)).clamp_(min=0.0)
    mass = float(left.sum())
    return left / mass if mass > 0.0 else residual


PART = RejectionVerifier
