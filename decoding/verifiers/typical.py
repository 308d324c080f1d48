"""The typical verifier: keep candidates the target finds plausible for how uncertain it is."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field

from decoding.drafters.base import Candidates
from decoding.model import Readout, ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.verifiers.base import Verifier, VerifyResult, emitted, probs_of
from turnout.registry import MethodParams
from turnout.types import TokenKind


class TypicalParams(MethodParams):
    """Parameters of `typical`."""

    epsilon: Annotated[float, Field(gt=0.0, lt=1.0, description="probability that is always enough")] = 0.09
    delta: Annotated[
        float, Field(gt=0.0, lt=1.0, description="share of exp(-entropy), in nats, that is enough where it is lower")
    ] = 0.3


class TypicalVerifier(Verifier):
    """Typical acceptance (paper #191, Medusa): the longest path of plausible candidates; not lossless.

    A candidate x is plausible where the target's distribution p gives p(x) > min(epsilon, delta * exp(-H(p))), H in
    nats. Of several longest paths the one with the highest probability stays. The law: a round emits whichever
    plausible path the drafter proposed, then the arg-max of p, and the arg-max begins the answer; nothing is sampled.
    For greedy requests p is one-hot and this is plain greedy decoding.
    """

    Params = TypicalParams
    papers = (191,)
    lossless = False
    accepts = (Candidates.FIXED,)
    want = ReadSpec(draw=None, probs=True)
    params: TypicalParams

    def judge(self, seq: Sequence, draft: DraftTree, rows: list[Readout], target: str) -> VerifyResult:
        """See `Verifier.judge`."""
        nodes = rows[: len(draft) + 1]  # what a drafter had fed along comes after them
        path = self._longest(draft, [probs_of(row) for row in nodes], begins=not seq.generated)
        tokens = [
            emitted(draft.tokens[node], rows[draft.parents[node] + 1], draft.source, TokenKind.ACCEPTED)
            for node in path
        ]
        end = path[-1] if path else ROOT
        kind = TokenKind.RECOVERED if draft.children(end) else TokenKind.BONUS
        row = rows[end + 1]
        tokens.append(emitted(int(probs_of(row).argmax()), row, target, kind))
        return VerifyResult(tuple(path), tuple(tokens))

    def _longest(self, draft: DraftTree, probs: list[torch.Tensor], begins: bool) -> list[int]:
        """The longest accepted path, the most probable one of several; float32 [vocab] at the root and every node."""
        reached = {ROOT: (0, 0.0)}  # length and log-probability of each accepted path
        bounds: dict[int, float] = {}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent not in reached:
                continue
            p = probs[parent + 1]
            if begins and parent == ROOT:
                accepted = token == int(p.argmax())
            else:
                if parent not in bounds:
                    bounds[parent] = self.bound(p)
                accepted = float(p[token]) > bounds[parent]
            if accepted:
                length, likelihood = reached[parent]
                reached[node] = (length + 1, likelihood + math.log(float(p[token])))
        best = max(reached, key=lambda node: reached[node])
        return draft.path(best)

    def bound(self, probs: torch.Tensor) -> float:
        """Return the bound that an accepted token's probability exceeds; probs: float32 [vocab]."""
        entropy = float(torch.special.entr(probs).sum())
        return min(self.params.epsilon, self.params.delta * math.exp(-entropy))


PART = TypicalVerifier
