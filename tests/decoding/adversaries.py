"""Drafters of ill will that draw: from distributions chosen against the target, or not from those they tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import Model
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree

# All tokens so far -> what the next one is drawn from, float32 [vocab].
Proposal = Callable[[list[int]], torch.Tensor]
SEQUENCES = 3


class Drawing(Drafter):
    """A chain, or three sequences independent of each other.

    Args:
        proposal: what it draws from.
        candidates: drawn or sequences.
        tells: what it says that it drew from; None: the truth.
    """

    kinds = frozenset({Candidates.DRAWN, Candidates.SEQUENCES})

    def __init__(self, proposal: Proposal, candidates: Candidates, tells: Proposal | None = None) -> None:
        super().__init__(candidates=candidates)
        self._proposal = proposal
        self._tells = tells or proposal

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        count = SEQUENCES if self.candidates is Candidates.SEQUENCES else 1
        tokens: list[int] = []
        parents: list[int] = []
        proposals: list[torch.Tensor | None] = []
        known: dict[tuple[int, int], int] = {}
        paths: list[list[int]] = [[] for _ in range(count)]
        for depth in range(min(room.depth, room.nodes // count)):
            for lane, path in enumerate(paths):
                before = seq.tokens + [tokens[node] for node in path]
                q = self._proposal(before)
                key = noise_key(round_seed(seq.seed, len(seq)), len(seq) + depth, Purpose.DRAFT, lane)
                step = (path[-1] if path else ROOT, int((q.log() + gumbel([key], len(q), q.device)[0]).argmax()))
                if step not in known:
                    known[step] = len(tokens)
                    parents.append(step[0])
                    tokens.append(step[1])
                    proposals.append(self._tells(before))
                path.append(known[step])
        sequences = tuple(map(tuple, paths)) if self.candidates is Candidates.SEQUENCES and tokens else ()
        return DraftTree(tuple(tokens), tuple(parents), model.name, tuple(proposals), sequences)


def uniform(vocab: int) -> Proposal:
    """Anything."""
    return lambda before: torch.full((vocab,), 1.0 / vocab)


def stubborn(vocab: int) -> Proposal:
    """One token, drawn from a distribution that has no other."""
    return lambda before: torch.eye(vocab)[(before[-1] + 1) % vocab]


def narrow(vocab: int) -> Proposal:
    """Two tokens of all, the second of them hardly ever."""

    def proposal(before: list[int]) -> torch.Tensor:
        q = torch.zeros(vocab)
        q[before[-1]], q[(before[-1] + 2) % vocab] = 0.97, 0.03
        return q

    return proposal


def follower(vocab: int) -> Proposal:
    """Mostly what the answer has said most often: what was accepted decides what is drafted."""

    def proposal(before: list[int]) -> torch.Tensor:
        q = torch.full((vocab,), 0.1 / (vocab - 1))
        q[Counter(before).most_common(1)[0][0]] = 0.9
        return q

    return proposal


ADVERSARIES: dict[str, Callable[[int], Proposal]] = {
    each.__name__: each for each in (uniform, stubborn, narrow, follower)
}
