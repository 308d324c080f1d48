"""The law of drafts by a model with layers left out or run in groups, over Markov models.

These are swift's sampled trees, clasp's chains and easyspec's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoding.drafters.base import Candidates, Drafter
from decoding.drafters.clasp import ClaspDrafter, ClaspParams
from decoding.drafters.easyspec import EasySpecDrafter, EasySpecParams
from decoding.drafters.swift import SwiftDrafter, SwiftParams
from decoding.lengths.base import LengthPolicy
from decoding.model import Model, Readout, ReadSpec
from decoding.partial_forward import Sketch
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.rejection import RejectionVerifier
from tests.decoding.markov_rounds import DRAFT, FAR, POSITIONS, SMALL, DraftBudget, Readings, p_value, play

MANY = 200_000


class Skipping(Readings):
    """With the layers left out that were asked for, a token's row is the draft's."""

    num_layers = 4

    async def partial_forward(self, seq: Sequence, sketch: Sketch, want: ReadSpec) -> list[Readout]:
        assert sketch.depth.skipped
        return [self.rows[token] for token in sketch.tokens[sketch.start :]]


class Grouped(Readings):
    """A model that draws as it reads; with its layers in groups it says something else."""

    num_layers = 6

    def _read(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec) -> list[Readout]:
        return self._drawn(seq, paths, want, 0)

    async def partial_forward(self, seq: Sequence, sketch: Sketch, want: ReadSpec) -> list[Readout]:
        assert sketch.depth.groups
        paths = [sketch.tokens[: node + 1] for node in range(sketch.start, len(sketch.tokens))]
        return self._drawn(seq, paths, want, 1)

    def _drawn(self, seq: Sequence, paths: list[tuple[int, ...]], want: ReadSpec, off: int) -> list[Readout]:
        """Rows of the table, or of one token further."""
        rows = [self.rows[((path or seq.tokens)[-1] + off) % len(self.rows)] for path in paths]
        logits = torch.stack([row.logits for row in rows if row.logits is not None])
        return read(logits, [RowContext(seq, path) for path in paths], [want] * len(rows))


class Skipped(Drafter):
    """A drafter by a part of the layers, over `Skipping` or `Grouped`, made anew for every answer."""

    kinds = frozenset({Candidates.DRAWN})

    def __init__(self, make: Callable[[], Drafter], draft: torch.Tensor) -> None:
        super().__init__()
        self._make = make
        self._model: Any = Grouped(draft) if make is easyspec else Skipping(draft)
        self.drafted = 0
        self.widest = 0

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        tree = await self._make().propose(self._model, seq, room, length)
        self.drafted += len(tree)
        self.widest = max(self.widest, *(tree.parents.count(parent) for parent in tree.parents), 0)
        return tree


def swift() -> Drafter:
    """With leaves at every place, whatever its confidence; it never tries layers here."""
    return SwiftDrafter(SwiftParams(threshold=0.0, context=64), Candidates.DRAWN)


def clasp() -> Drafter:
    drafter = ClaspDrafter(ClaspParams(threshold=0.0), Candidates.DRAWN)
    drafter.skipped = frozenset({2, 3})
    return drafter


def easyspec() -> Drafter:
    return EasySpecDrafter(EasySpecParams(group=2), Candidates.DRAWN)


LAWS: dict[str, dict[str, Any]] = {"raw": {}, "truncated": {"temperature": 0.6, "top_p": 0.9}}


@pytest.mark.parametrize("make", [swift, clasp, easyspec])
@pytest.mark.parametrize("table", [DRAFT, FAR], ids=["near", "far"])
def test_the_law_of_drawn_drafts_is_the_targets(make: Callable[[], Drafter], table: torch.Tensor) -> None:
    drafter = Skipped(make, table)
    assert p_value(drafter, RejectionVerifier(), 600, SMALL) > 1e-4
    assert drafter.drafted > 600
    assert (drafter.widest > 1) == (make is swift)


@pytest.mark.exactness
@pytest.mark.parametrize("make", [swift, clasp, easyspec])
@pytest.mark.parametrize("law", list(LAWS))
def test_the_law_over_200_000_runs(make: Callable[[], Drafter], law: str) -> None:
    assert p_value(Skipped(make, DRAFT), RejectionVerifier(), MANY, SMALL, **LAWS[law]) > 1e-3


class Resorted(Skipped):
    """Planted: siblings are offered in another order than they were drawn in."""

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        tree = await super().propose(model, seq, room, length)
        first = [node for node, parent in enumerate(tree.parents) if parent == -1]
        order = sorted(first, key=lambda node: tree.tokens[node])
        tokens = list(tree.tokens)
        for node, other in zip(first, order, strict=True):
            tokens[node] = tree.tokens[other]
        return DraftTree(tuple(tokens), tree.parents, tree.source, tree.proposals)


def test_siblings_that_are_sorted_again_are_caught() -> None:
    assert p_value(Resorted(swift, FAR), RejectionVerifier(), 2_000, SMALL) < 1e-6


def test_the_first_token_gets_no_draft() -> None:
    """A chain stands behind at least two tokens; the law above is of answers that begin without one."""
    drafter = Skipped(clasp, DRAFT)
    model: Any = Readings(DRAFT)
    play(drafter, RejectionVerifier(), model, [Readout(probs=row) for row in DRAFT], 0, SMALL)
    assert 0 < drafter.drafted <= 2 * POSITIONS
