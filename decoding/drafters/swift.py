"""The target drafts for itself with sub-layers left out; which ones is searched for while it serves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence as Path
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.draft_trees import sibling_proposals
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import ReadSpec
from decoding.noise import Purpose, gumbel, noise_key, round_seed
from decoding.partial_drafts import charge_helper, draft_want, partial_chain
from decoding.partial_forward import LayerSelection, Sketch
from decoding.sequence import Sequence
from decoding.skip_search import ADVISER, SkipSearch
from decoding.tree import ROOT, DraftTree
from turnout.errors import invalid
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool

TOP = ReadSpec(draw=None, top=1)
# Candidates at a place by how sure the draft is of its best token: above .95, .8, .5, and below.
SURE = (0.95, 0.8, 0.5)
WIDTHS = {Candidates.FIXED: (3, 5, 8, 10), Candidates.DRAWN: (1, 3, 5, 10)}


class SwiftParams(MethodParams):
    """Parameters of `swift`."""

    skipped: Annotated[float, Field(ge=0.0, le=0.9, description="share of the inner sub-layers left out")] = 0.45
    threshold: Annotated[
        float, Field(ge=0.0, le=1.01, description="a draft ends below a token whose distribution has none so probable")
    ] = 0.8
    context: Annotated[int, Field(ge=4, le=256, description="written tokens a set of sub-layers is tried on")] = 32


class SwiftDrafter(Drafter):
    """Self-speculation with skipped sub-layers (paper #153, SWIFT).

    A chain of the partial model's tokens, with further candidates as leaves, the more the less sure it is. Once the
    request has written enough, one set of sub-layers a round is tried: the partial model predicts the first written
    tokens, all in one forward, and the best set is kept for this and later requests of the tenant. Before that, the set
    that earlier requests found is scored on this one's text.
    """

    Params = SwiftParams
    papers = (153,)
    runs_on = "large"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    depth = 25
    nodes = 128
    params: SwiftParams
    _checked = False  # whether this request's text has been used to check what earlier ones found
    _scored: frozenset[frozenset[int]] = frozenset()  # sets that were scored on this request's text

    def check(self, models: ModelPool) -> None:
        """Refuse a model without inner layers."""
        if models.large.num_layers < 3:
            raise invalid(self.where, f"swift needs a model of 3 layers; {models.large.name!r} has fewer")

    @property
    def share(self) -> float:
        """The sub-layers that are left, the first and the last layer taken to be few of many."""
        return 1.0 - self.params.skipped

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain with leaves."""
        search = self._search(model, seq)
        # The first written token is predicted from the last of the prompt's, which needs one before it.
        if seq.num_prompt_tokens > 1 and len(seq.generated) > self.params.context:
            first, self._checked = not self._checked, True
            if first and search.doubtful:
                tried = search.best
                search.check(tried, await self._score(model, seq, tried))
            elif not search.done:
                await self._try_one(model, seq, search)
        widest = WIDTHS[self.candidates][-1]
        want = draft_want(self.candidates) | ReadSpec(draw=None, top=widest) | length.want

        def continues(path: Path[Step]) -> bool:
            return _confidence(path[-1]) >= self.params.threshold and length.continues(path)

        most = min(room.depth, room.nodes)
        path = await partial_chain(model, seq, LayerSelection(skipped=search.best), most, want, continues)
        return self._with_leaves(seq, path, room.nodes, model.name)

    def _search(self, model: Model, seq: Sequence) -> SkipSearch:
        share = self.params.skipped
        return model.stores.open(f"swift/{share}", seq.learner, lambda: SkipSearch(model.num_layers, share))

    async def _try_one(self, model: Model, seq: Sequence, search: SkipSearch) -> None:
        if search.advice_is_next:
            # The first import of scikit-learn takes a second, in which no other request's tokens may wait.
            await asyncio.to_thread(import_module, ADVISER)
        tried = search.propose()
        # On the same text a set predicts the same again.
        search.report(tried, None if tried in self._scored else await self._score(model, seq, tried))

    async def _score(self, model: Model, seq: Sequence, tried: frozenset[int]) -> float:
        """Share of the first written tokens that the partial model predicts from those before."""
        self._scored |= {tried}
        count, base = self.params.context, seq.num_prompt_tokens - 1
        twin = model.fork(seq)
        try:
            written = tuple(seq.tokens[base : base + count])
            rows = await model.partial_forward(twin, Sketch.chain(base, written, 0, LayerSelection(skipped=tried)), TOP)
        finally:
            charge_helper(seq, twin, model)
            model.release(twin)
        expected = [token.id for token in seq.generated[:count]]
        return sum(row.top[0][0] == token for row, token in zip(rows, expected, strict=True)) / count

    def _with_leaves(self, seq: Sequence, path: list[Step], most: int, source: str) -> DraftTree:
        """The chain goes first among its siblings; leaves are added while there is room, the first places first."""
        drawn = self.candidates is Candidates.DRAWN
        spare = most - len(path)
        tokens: list[int] = []
        parents: list[int] = []
        proposals: list[torch.Tensor | None] = []
        parent = ROOT
        for place, step in enumerate(path):
            width = min(_width(step, self.candidates) - 1, spare)
            here, laws = _siblings(step, width, seq, place) if drawn else _runners_up(step, width)
            spare -= len(here) - 1
            tokens += here
            parents += [parent] * len(here)
            proposals += laws
            parent = len(tokens) - len(here)
        return DraftTree(tuple(tokens), tuple(parents), source, tuple(proposals) if drawn else ())


def _confidence(step: Step) -> float:
    return math.exp(step.row.top[0][1])


def _width(step: Step, candidates: Candidates) -> int:
    sure = _confidence(step)
    return WIDTHS[candidates][sum(sure <= bound for bound in SURE)]


def _runners_up(step: Step, width: int) -> tuple[list[int], list[torch.Tensor | None]]:
    others = [token for token, _ in step.row.top if token != step.token][:width]
    tokens = [step.token, *others]
    return tokens, [None] * len(tokens)


def _siblings(step: Step, width: int, seq: Sequence, place: int) -> tuple[list[int], list[torch.Tensor | None]]:
    """The drawn token and further ones, drawn without it: the next keys of the same Gumbel-top-k."""
    probs = step.row.probs
    assert probs is not None
    key = noise_key(round_seed(seq.seed, len(seq)), len(seq) + place, Purpose.DRAFT)
    keys = probs.log() + gumbel([key], probs.numel(), probs.device)[0]
    best = keys.topk(min(width + 1, int((probs > 0).sum())))
    tokens = best.indices.tolist()
    return tokens, list(sibling_proposals(probs, tokens))


PART = SwiftDrafter
