"""The SpecTr verifier: judge several independent draft sequences together, at a common acceptance ratio."""

from __future__ import annotations

import torch

from decoding.drafters.base import Candidates
from decoding.model import Readout, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, uniform
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, emitted, probs_of
from turnout.types import TokenKind

# Halvings of [1, k]: what is left is below double precision's rounding of sums over a vocabulary.
HALVINGS = 48


class SpecTrVerifier(Verifier):
    """K-SEQ (paper #165, SpecTr: Fast Speculative Decoding via Optimal Transport); keeps the target's law exactly.

    At a node the k sequences that run through it and go on have next tokens drawn independently from q. With p the
    target's distribution and beta(rho) = sum of min(q, p / rho), the least rho in [1, k] at which 1 - (1 - beta)^k is
    at most rho * beta makes what is left of p nowhere negative. Each token x in turn is accepted with probability
    min(1, p(x) / (rho * q(x))); if none is, the token is drawn from what is left. The sequences that hold the chosen
    token survive, also where it was drawn. One sequence is ordinary speculative sampling.
    """

    papers = (165,)
    lossless = True
    accepts = (Candidates.SEQUENCES,)
    want = ReadSpec(draw=None, probs=True)

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`."""
        path: list[int] = []
        tokens = []
        node = ROOT
        while True:
            row, depth = rows[node + 1], len(path)
            position = len(seq) + depth
            on = [nodes[depth] for nodes in draft.sequences if len(nodes) > depth and list(nodes[:depth]) == path]
            chosen, residual = self.choose(seq.seed, position, draft, on, probs_of(row))
            if chosen is None:
                key = noise_key(seq.seed, position, Purpose.RESIDUAL)
                drawn = int((residual.log() + gumbel([key], residual.numel(), residual.device)[0]).argmax())
                chosen = next((child for child in on if draft.tokens[child] == drawn), None)
                if chosen is None:
                    tokens.append(emitted(drawn, row, target, TokenKind.RECOVERED if on else TokenKind.BONUS))
                    return VerifyResult(tuple(path), tuple(tokens))
            tokens.append(emitted(draft.tokens[chosen], row, draft.source, TokenKind.ACCEPTED))
            path.append(chosen)
            node = chosen

    def choose(
        self, seed: int, position: int, draft: DraftTree, candidates: list[int], probs: torch.Tensor
    ) -> tuple[int | None, torch.Tensor]:
        """The accepted node, if any, and what to draw from if not (float32 [vocab]).

        Args:
            seed: of the sequence.
            position: of the token.
            draft: the tree.
            candidates: the next node of each surviving sequence, in draw order; several may be the same.
            probs: the target's distribution, float32 [vocab].

        Raises:
            ValueError: a candidate has no distribution it was drawn from.
        """
        if not candidates:
            return None, probs
        proposal = draft.proposal(candidates[0])
        if proposal is None:
            raise ValueError("sequences need the distribution each token was drawn from")
        proposal = proposal.to(probs.device)
        rho = least_ratio(probs, proposal, len(candidates))
        for rank, child in enumerate(candidates):
            token = draft.tokens[child]
            coin = uniform(noise_key(seed, position, Purpose.ACCEPT, rank))
            if coin * rho * float(proposal[token]) < float(probs[token]):
                return child, probs
        return None, what_is_left(probs, proposal, rho, len(candidates))


def least_ratio(probs: torch.Tensor, proposal: torch.Tensor, count: int) -> float:
    """The least rho in [1, count] with 1 - (1 - beta(rho))^count <= rho * beta(rho); both float32 [vocab]."""
    if count == 1:
        return 1.0
    p, q = probs.double(), proposal.double()
    # Only tokens with 1 < p / q < count change sides within the bracket.
    scarce, plenty = p <= q, p >= count * q
    below, above = float(p[scarce].sum()), float(q[plenty & ~scarce].sum())
    between = ~(scarce | plenty)
    p, q = p[between], q[between]

    def valid(rho: float) -> bool:
        beta = above + below / rho + float(torch.minimum(q, p / rho).sum())
        return accept_probability(beta, count) <= rho * beta

    low, high = 1.0, float(count)
    if valid(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if valid(middle) else (middle, high)
    return high


def accept_probability(beta: float, count: int) -> float:
    """That one of `count` independent candidates is accepted, each with probability `beta`."""
    return 1.0 - (1.0 - min(beta, 1.0)) ** count


def what_is_left(probs: torch.Tensor, proposal: torch.Tensor, rho: float, count: int) -> torch.Tensor:
    """Return the residual distribution after all candidates were refused, float32 [vocab].

    Where rounding leaves nothing (a refusal had probability zero), `probs` stays.
    """
    p, q = probs.double(), proposal.double()
    taken = torch.minimum(q, p / rho)
    beta = float(taken.sum())
    if not beta > 0.0:
        return probs
    left = (p - taken * (accept_probability(beta, count) / beta)).clamp_(min=0.0)
    mass = float(left.sum())
    return (left / mass).to(probs.dtype) if mass > 0.0 else probs


PART = SpecTrVerifier
