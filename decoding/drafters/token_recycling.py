"""Recycles the target's discarded guesses: what followed each token when it was last read, as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from decoding.drafters._readings import readings
from decoding.drafters.base import DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.model import ReadSpec
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult

GUESSES = 8
UNKNOWN = -1

# The paper's tree: how many children a node has; a node is named by the ranks on the way to it, "" the root.
TEMPLATE = {
    "": 8,
    **{"0": 8, "1": 4, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1},
    **{"00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1},
    **{"10": 2, "11": 1, "20": 1, "30": 1, "40": 1, "50": 1},
    **{"000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1, "100": 1, "200": 1, "300": 1},
    **{"0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1},
    **{"00000": 2, "00010": 1},
}
Level = tuple[torch.Tensor, torch.Tensor]


def template_levels(num_children: dict[str, int]) -> list[Level]:
    """A template level by level: int64 [n] each node's parent in the level above, and its rank."""
    levels: list[Level] = []
    paths = [""]
    while True:
        nodes = [(index, rank) for index, path in enumerate(paths) for rank in range(num_children.get(path, 0))]
        if not nodes:
            return levels
        levels.append((torch.tensor([index for index, _ in nodes]), torch.tensor([rank for _, rank in nodes])))
        paths = [f"{paths[index]}{rank}" for index, rank in nodes]


LEVELS = template_levels(TEMPLATE)


class TokenRecyclingDrafter(Drafter):
    """Token Recycling (paper #63, Turning Trash into Treasure).

    Every token the target reads, accepted or not, leaves the 8 most probable next tokens in its row of a matrix that
    is the tenant's and outlives the request. Drafts fill the paper's tree of 80 nodes from it; where a row is still
    empty there is no node, so that no two siblings are equal.
    """

    papers = (63,)
    depth = len(LEVELS)
    nodes = sum(len(ranks) for _, ranks in LEVELS)
    want = ReadSpec(draw=None, top=GUESSES)

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The tree as far as it is known; a smaller room cuts it breadth first."""
        return fill(_matrix(model, seq), seq.tokens[-1], LEVELS[: room.depth], room.nodes, model.name)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep the most probable next tokens of everything that was read; of a token read twice, what counted last."""
        latest = {
            token: [guess for guess, _ in row.top[:GUESSES]] for (token,), row in readings(seq, draft, verdict, width=1)
        }
        guesses = torch.tensor(list(latest.values()), dtype=torch.int32)
        _matrix(model, seq)[list(latest), : guesses.shape[1]] = guesses


def fill(matrix: torch.Tensor, root: int, levels: list[Level], most: int, source: str) -> DraftTree:
    """A template filled level by level.

    Args:
        matrix: int32 [vocab, 8], next tokens by rank; UNKNOWN where there is none.
        root: the token the tree stands under.
        levels: see `template_levels`.
        most: nodes at most; the first in breadth-first order are kept.
        source: the draft's.
    """
    tokens: list[int] = []
    parents: list[int] = []
    above, places = torch.tensor([root]), [ROOT]
    for index, ranks in levels:
        known = above[index]
        # An unknown parent reads some row and forgets it again: gathers of a fixed shape are the fastest.
        level = matrix[known.clamp(min=0), ranks].long().masked_fill_(known < 0, UNKNOWN)
        below: list[int] = []
        for token, parent in zip(level.tolist(), index.tolist(), strict=True):
            if token == UNKNOWN:
                below.append(ROOT)
                continue
            if len(tokens) == most:
                return DraftTree(tuple(tokens), tuple(parents), source)
            below.append(len(tokens))
            tokens.append(token)
            parents.append(places[parent])
        above, places = level, below
    return DraftTree(tuple(tokens), tuple(parents), source)


def _matrix(model: Model, seq: Sequence) -> torch.Tensor:
    """The tenant's, int32 [vocab, 8]."""
    shape = (model.vocab_size, GUESSES)
    return model.stores.open(
        f"token_recycling/{model.vocab_size}", seq.learner, lambda: torch.full(shape, UNKNOWN, dtype=torch.int32)
    )


PART = TokenRecyclingDrafter
