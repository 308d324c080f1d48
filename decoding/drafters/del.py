"""The target's first layers draft with its own head; which layers, and how far, every round decides anew."""
# ruff: noqa: N999 (the part's name is the paper's, which Python reserves; parts are loaded by name)

from __future__ import annotations

from collections.abc import Sequence as Path
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.exit_choice import ExitChoice, Shadow
from decoding.lengths._readings import top_probability
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import ReadSpec
from decoding.partial_drafts import chain_proposals, draft_want, exit_chain
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.errors import invalid
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.verifiers.base import VerifyResult

BEST = ReadSpec(draw=None, top=1)


class DelParams(MethodParams):
    """Parameters of `del`."""

    decay: Annotated[
        float, Field(gt=0.0, le=1.0, description="what remains of a round's weight in the next one's statistics")
    ] = 0.95
    stops: Annotated[bool, Field(description="end a draft below a token of less confidence than right ones have")] = (
        True
    )


class DelDrafter(Drafter):
    """Dynamic exit layer (paper #142, DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding).

    At every verified place each layer's state goes through the model's own norm and head: had the model been left
    there, this token would have been drafted. The next round exits where the expected number of tokens for each layer
    run is largest, or drafts nothing. The states come from the round's own forwards, those below the exit from the
    draft's and the others from verification; only the head runs for them, for all in one call. Tokens are compared as
    the most probable ones, also where the request samples.
    """

    Params = DelParams
    papers = (142,)
    runs_on = "large"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    depth = 18
    changing = ("_share",)
    params: DelParams

    def __init__(self, params: DelParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self.choice: ExitChoice | None = None
        self._share = 0.5
        self._drafted: tuple[int, ...] = ()
        self._below: list[dict[int, torch.Tensor]] = []  # states of the layers that drafted, at every place
        self._verified: list[dict[int, torch.Tensor]] = []  # layer -> state, at every verified place

    def check(self, models: ModelPool) -> None:
        """Refuse a model without a layer to leave at."""
        count = models.large.num_layers
        if count < 2:
            raise invalid(self.where, f"del needs a model of 2 layers; {models.large.name!r} has fewer")
        self.choice = ExitChoice(count, self.params.decay)
        self.want = ReadSpec(draw=None, hidden=frozenset(range(1, count + 1)))

    @property
    def share(self) -> float:
        """The layers of the last draft; half of them before there was one."""
        return self._share

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain from the layers that promise most; none where plain decoding does."""
        assert self.choice is not None
        await self._score(model, seq, self.choice)
        layer, most = self.choice.best(min(room.depth, room.nodes))
        self._share = layer / model.num_layers
        at_layers = ReadSpec(draw=None, hidden=frozenset(range(1, layer + 1)))
        threshold = self.choice.threshold(layer) if self.params.stops else 0.0

        def continues(path: Path[Step]) -> bool:
            return top_probability(path[-1].row) >= threshold and length.continues(path)

        want = draft_want(self.candidates) | BEST | length.want | at_layers
        draft = await exit_chain(model, seq, layer, most, (want, at_layers), continues)
        self._drafted = tuple(step.token for step in draft.path)
        self._below = [row.hidden for row in draft.rows]
        proposals = chain_proposals(draft.path) if self.candidates is Candidates.DRAWN else None
        return DraftTree.chain(list(self._drafted), model.name, proposals)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep every layer's state at the places whose tokens were emitted, the first mismatch included."""
        rows = [verdict.rows[0], *(verdict.rows[node + 1] for node in verdict.path)]
        below = self._below if self._drafted == draft.tokens else []
        self._verified = [dict(row.hidden) for row in rows]
        for place, states in enumerate(below[: len(rows)]):
            self._verified[place] = states | self._verified[place]
        self._drafted, self._below = (), []

    async def _score(self, model: Model, seq: Sequence, choice: ExitChoice) -> None:
        """Turn what was kept into shadow tokens: one call of the head for all layers and places."""
        num_layers = model.num_layers
        places, self._verified = self._verified, []
        # Layers that another drafter's exit left out at some place are not scored this time.
        layers = [layer for layer in range(1, num_layers + 1) if places and all(layer in each for each in places)]
        if num_layers not in layers:
            return
        states = torch.stack([each[layer] for layer in layers for each in places])
        rows = await model.read(seq, states, [()] * len(states), BEST)
        by_layer = [rows[at : at + len(places)] for at in range(0, len(rows), len(places))]
        right = [row.top[0][0] for row in by_layer[-1]]
        for layer, said in zip(layers[:-1], by_layer[:-1], strict=True):
            pairs = zip(said, right, strict=True)
            choice.observe(layer, [Shadow(row.top[0][0] == token, top_probability(row)) for row, token in pairs])


PART = DelDrafter
