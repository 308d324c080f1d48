"""The target drafts for itself with layers left out that the last verified states say it can do without."""

from __future__ import annotations

import math
from collections.abc import Sequence as Path
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.drafters.base import NOTHING, Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import ReadSpec
from decoding.partial_drafts import chain_proposals, charge_helper, draft_want, partial_chain
from decoding.partial_forward import LayerSelection, Sketch
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from turnout.errors import invalid
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.verifiers.base import VerifyResult


class ClaspParams(MethodParams):
    """Parameters of `clasp`."""

    skipped: Annotated[float, Field(ge=0.0, le=0.9, description="share of the layers left out")] = 0.5
    threshold: Annotated[
        float, Field(ge=0.0, le=1.01, description="a draft ends below a token whose distribution has none so probable")
    ] = 0.7
    interval: Annotated[int, Field(ge=1, le=4096, description="tokens after which the layers are chosen anew")] = 64


class ClaspDrafter(Drafter):
    """Self-speculation with layers skipped in context (paper #54, CLaSp).

    The layers are chosen by dynamic programming on the states of the last verified token, so that what the remaining
    layers make of it points where the whole model's states point.
    """

    Params = ClaspParams
    papers = (54,)
    runs_on = "large"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    depth = 16
    changing = ("want",)
    params: ClaspParams

    def __init__(self, params: ClaspParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self.skipped: frozenset[int] | None = None
        self._every_layer = NOTHING
        self._verified: dict[int, torch.Tensor] = {}
        self._chosen_at = 0

    def check(self, models: ModelPool) -> None:
        """Refuse a model without layers to skip."""
        if models.large.num_layers < 2:
            raise invalid(self.where, f"clasp needs a model of 2 layers; {models.large.name!r} has fewer")
        self._every_layer = ReadSpec(draw=None, hidden=frozenset(range(models.large.num_layers + 1)))
        self.want = self._every_layer

    @property
    def share(self) -> float:
        """The layers that are left."""
        return 1.0 - self.params.skipped

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain by the layers that were chosen; none before the first verified token."""
        if self._verified and len(seq) > 2:
            await self._choose(model, seq)
        if self.skipped is None:
            return DraftTree.empty(model.name)
        want = draft_want(self.candidates) | ReadSpec(draw=None, top=1) | length.want

        def continues(path: Path[Step]) -> bool:
            return self._sure(path[-1]) and length.continues(path)

        most = min(room.depth, room.nodes)
        path = await partial_chain(model, seq, LayerSelection(skipped=self.skipped), most, want, continues)
        proposals = chain_proposals(path) if self.candidates is Candidates.DRAWN else None
        return DraftTree.chain([step.token for step in path], model.name, proposals)

    async def _choose(self, model: Model, seq: Sequence) -> None:
        most = int(model.num_layers * self.params.skipped)
        # The cells of a layer stand where the next tokens will: near the end of the context there is no place for all.
        if len(seq) - 1 + most <= model.max_length:
            # On a copy: the sequence's own last state would be cut off, and read again by the whole model.
            twin = model.fork(seq)
            try:
                layers = await choose_layers(model, twin, self._verified, most)
            finally:
                charge_helper(seq, twin, model)
                model.release(twin)
            self.skipped = frozenset(part for layer in layers for part in (2 * layer, 2 * layer + 1))
        self._chosen_at, self._verified, self.want = len(seq), {}, NOTHING

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep the states of the token before the one just emitted, where the layers are due to be chosen anew."""
        if self.want != NOTHING:
            node = verdict.path[-1] if verdict.path else ROOT
            states = verdict.rows[node + 1].hidden
            # Where another drafter left early, the layers before its exit are not run again: due until all are there.
            self._verified = states if self._every_layer.hidden <= states.keys() else {}
        elif len(seq) - self._chosen_at >= self.params.interval:
            self.want = self._every_layer

    def _sure(self, step: Step) -> bool:
        return math.exp(step.row.top[0][1]) >= self.params.threshold


async def choose_layers(model: Model, seq: Sequence, states: dict[int, torch.Tensor], most: int) -> list[int]:
    """Choose `most` layers to skip, by dynamic programming over (layer, layers skipped so far).

    A cell holds the state of the path whose state is closest, in angle, to the whole model's at that layer. All cells
    of a layer are alternatives for one place and run through the next layer in one forward.

    Args:
        model: whose layers.
        seq: the sequence; the place is that of its last token but one.
        states: layer -> [hidden], the whole model's state there after that number of layers.
        most: layers skipped.
    """
    base, token = len(seq) - 2, seq.tokens[-2]
    cells = [states[0]]
    skipped: list[tuple[int, ...]] = [()]
    for layer in range(model.num_layers):
        want = ReadSpec(draw=None, hidden=frozenset({layer + 1}))
        depth = LayerSelection(first=layer, last=layer + 1)
        if layer == 0:
            rows = await model.partial_forward(seq, Sketch(base, (token,), (ROOT,), 0, depth), want)
        else:
            copies = (token,) * len(cells)
            sketch = Sketch(base, copies, (ROOT,) * len(cells), 0, depth, torch.stack(cells))
            rows = await model.partial_forward(seq, sketch, want)
        kept = [row.hidden[layer + 1] for row in rows]
        cells, skipped = _next_cells(states[layer + 1], layer, cells, kept, skipped, most)
    return list(skipped[-1])


def _next_cells(
    goal: torch.Tensor,
    layer: int,
    before: list[torch.Tensor],
    kept: list[torch.Tensor],
    skipped: list[tuple[int, ...]],
    most: int,
) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """For each number of skipped layers the better of running this layer and skipping it."""
    cells: list[torch.Tensor] = []
    paths: list[tuple[int, ...]] = []
    for count in range(min(len(before), most) + 1):
        options = []
        if count < len(kept):
            options.append((_cosine(kept[count], goal), kept[count], skipped[count]))
        if count > 0:
            options.append((_cosine(before[count - 1], goal), before[count - 1], (*skipped[count - 1], layer)))
        _, state, path = max(options, key=lambda option: option[0])
        cells.append(state)
        paths.append(path)
    return cells, paths


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.cosine_similarity(one, other, dim=0))


PART = ClaspDrafter
