"""Independent heads on the target's last hidden state, their best guesses in a tree of measured shape."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.artifacts import Artifact, ArtifactName
from decoding.drafters._heads import HeadDrafter, HeadParams
from decoding.drafters.base import Candidates, DraftBudget
from decoding.heads import MedusaHeads
from decoding.model import Readout, ReadSpec
from decoding.parts import Example, ModelShape
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from decoding.model import Model

Accuracies = tuple[tuple[float, ...], ...]


class MedusaParams(HeadParams):
    """Parameters of `medusa`."""

    artifact: ArtifactName = "medusa"
    chain: Annotated[bool, Field(description="only every head's best guess, one after the other")] = False


@dataclass(frozen=True, slots=True)
class RankTree:
    """A tree of guesses without tokens: a node at depth d holds a guess of head d - 1.

    Attributes:
        parents: [n] index of each node's parent, ROOT for the root.
        guesses: [n] which head's guess a node is, and of which rank, both from 0.
        accepted: expected number of accepted nodes, where heads are right independently of each other.
    """

    parents: tuple[int, ...]
    guesses: tuple[tuple[int, int], ...]
    accepted: float

    def fill(self, tokens: list[list[int]], source: str) -> DraftTree:
        """The draft of each head's guesses, best first."""
        return DraftTree(tuple(tokens[head][rank] for head, rank in self.guesses), self.parents, source)


@lru_cache(maxsize=256)
def grow_rank_tree(accuracies: Accuracies, nodes: int) -> RankTree:
    """The tree with the most expected accepted nodes: the next node is always the one most probably accepted.

    No parent is less probable than its child, so that the best nodes of all are a tree.

    Args:
        accuracies: for each head, the chance that its guess of each rank is right.
        nodes: most nodes.
    """
    heap: list[tuple[float, int, int, int, int]] = []  # chance negated, serial number, parent, head, rank
    serial = 0

    def push(parent: int, head: int, chance: float) -> None:
        nonlocal serial
        for rank, accuracy in enumerate(accuracies[head] if head < len(accuracies) else ()):
            if chance * accuracy > 0.0:
                heapq.heappush(heap, (-chance * accuracy, serial, parent, head, rank))
                serial += 1

    parents: list[int] = []
    guesses: list[tuple[int, int]] = []
    accepted = 0.0
    push(ROOT, 0, 1.0)
    while heap and len(parents) < nodes:
        negated, _, parent, head, rank = heapq.heappop(heap)
        parents.append(parent)
        guesses.append((head, rank))
        accepted -= negated
        push(len(parents) - 1, head + 1, -negated)
    return RankTree(tuple(parents), tuple(guesses), accepted)


class MedusaDrafter(HeadDrafter[MedusaHeads]):
    """Medusa (paper #191), and blockwise parallel decoding (paper #53, the chain).

    The pending token stands where the paper has its own model's first guess, so head k drafts depth k + 1. The tree's
    shape comes from the accuracy of every head's guesses by rank, which training measured on answers it had not seen.

    Attributes:
        reads: what is read of every head.
    """

    Params = MedusaParams
    network = MedusaHeads
    papers = (191, 53)
    kinds = frozenset({Candidates.FIXED})
    nodes = 63
    params: MedusaParams

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        head = MedusaHeads(shape.width, heads=3)
        return Example(kind=cls.name, head=head, settings={"accuracies": [[0.5, 0.3, 0.2]] * 3})

    def use(self, head: MedusaHeads, artifact: Artifact) -> None:
        """See `HeadDrafter.use`."""
        super().use(head, artifact)
        ranks = 1 if self.params.chain else None
        self._accuracies: Accuracies = tuple(tuple(each[:ranks]) for each in artifact.settings["accuracies"])
        self.reads = ReadSpec(draw=None, top=max(map(len, self._accuracies)))

    @property
    def share(self) -> float:
        """Its own network only."""
        return 0.0

    async def draft(self, model: Model, seq: Sequence, hidden: torch.Tensor, room: DraftBudget) -> DraftTree:
        """Guesses of as many heads as there is room for."""
        return (await self.guess(model, seq, hidden, room))[0]

    async def guess(
        self, model: Model, seq: Sequence, hidden: torch.Tensor, room: DraftBudget
    ) -> tuple[DraftTree, Readout]:
        """The draft, and what the first head says."""
        depth = min(room.depth, len(self._accuracies))
        shape = grow_rank_tree(self._accuracies[:depth], room.nodes)
        if self.head.outputs is None:
            rows = await model.read(seq, self.head(hidden)[:depth], [()] * depth, self.reads, normed=True)
        else:
            logits = self.head.logits(hidden)[:depth, : model.vocab_size]
            rows = read(logits, [RowContext(seq)] * depth, [self.reads] * depth)
        return shape.fill([[token for token, _ in row.top] for row in rows], model.name), rows[0]


PART = MedusaDrafter
