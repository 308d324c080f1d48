"""The draft model runs groups of its layers side by side, and repairs its cache after every verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from pydantic import Field

from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import NoiseKind, Readout, ReadSpec
from decoding.partial_forward import LayerSelection, Sketch
from decoding.sequence import Sequence
from decoding.tree import DraftTree
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model
    from decoding.verifiers.base import VerifyResult

BEST = ReadSpec(draw=None, top=1)


class EasySpecParams(MethodParams):
    """Parameters of `easyspec`."""

    group: Annotated[
        int, Field(ge=1, le=64, description="layers whose attentions take the same input; 1: drafts are model_chain's")
    ] = 4
    exact_first: Annotated[int, Field(ge=0, le=1024, description="first layers that are in no group")] = 1
    exact_last: Annotated[int, Field(ge=0, le=1024, description="last layers that are in no group")] = 0
    compare: Annotated[
        bool,
        Field(
            description="read the exact draft model's best token wherever it was read exactly afterwards, and note in"
            " the answer how often the grouped layers had the same one"
        ),
    ] = False


class EasySpecDrafter(Drafter):
    """A chain drafted by a model whose attentions do not wait for each other (paper #178, EasySpec).

    All attentions of a group of layers take what goes into the group; the MLPs follow in order, each after its own
    layer's attention. Devices that share the model add their parts up once for a group; on one device nothing is saved.

    Keys and values of such layers are approximate, so none of them outlives its round: before it drafts again, one
    exact forward reads what has been accepted, and the first token of a draft is drawn from what that forward says.
    The others are drawn from what the grouped layers say, and judged against that.
    """

    Params = EasySpecParams
    papers = (178,)
    runs_on = "small"
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    changing = ("compared", "agreed")
    params: EasySpecParams
    # Without it errors pile up in the cache: tests show how fast, requests cannot ask for it.
    calibrates: ClassVar[bool] = True

    def __init__(self, params: EasySpecParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self.compared = 0
        self.agreed = 0
        self._drafted: tuple[int, ...] = ()
        self._guesses: list[int] = []  # the grouped layers' best tokens, from the draft's second place on
        self._accepted = 0
        self._began = 0
        self._run: tuple[int, ...] = ()

    @property
    def note(self) -> str:
        """See `Drafter.note`."""
        if not self.compared:
            return ""
        return (
            f"easyspec: the grouped layers' best token was the exact draft's at {self.agreed} of {self.compared} places"
        )

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain, as `model_chain` makes them."""
        drawn = self.candidates is Candidates.DRAWN
        want = ReadSpec(draw=NoiseKind.ROUND if drawn else NoiseKind.SAMPLE, probs=drawn) | length.want
        if self.params.compare:
            want = want | BEST
        depth = LayerSelection(groups=grouped(model.num_layers, self.params))
        row = await self._calibrate(model, seq, want) if self.calibrates else await self._go_on(model, seq, depth, want)
        path: list[Step] = []
        while True:
            path.append(Step(row.token, row))
            ended = row.token in seq.end_ids
            if ended or len(path) >= min(room.depth, room.nodes) or not length.continues(path):
                break
            row = await self._guess(model, seq, tuple(step.token for step in path), depth, want)
        if self.params.compare:
            self._drafted = tuple(step.token for step in path)
            self._guesses = [step.row.top[0][0] for step in path[1:]]
        proposals: list[torch.Tensor | None] = [step.row.probs for step in path]
        return DraftTree.chain([step.token for step in path], model.name, proposals if drawn else None)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep how much of the draft was accepted; another's says nothing about this one's layers."""
        if draft.tokens != self._drafted:
            self._guesses = []
        self._accepted = verdict.num_accepted_tokens

    async def _calibrate(self, model: Model, seq: Sequence, want: ReadSpec) -> Readout:
        """One exact forward over what was accepted; what it says at the end."""
        if not self._guesses or not self._accepted:
            [row] = await model.extend(seq, want=want)
            return row
        top = model.num_layers
        [row] = await model.extend(seq, want=want | ReadSpec(draw=None, before=frozenset({top})))
        states, guesses, self._guesses = row.before.get(top), self._guesses, []
        # After each accepted token, and before the target's own last one.
        if states is not None and len(states) == self._accepted:
            exact = await model.read(seq, states, [()] * len(states), BEST)
            same = [guess == each.top[0][0] for guess, each in zip(guesses, exact, strict=False)]
            self.compared += len(same)
            self.agreed += sum(same)
        return row

    async def _guess(
        self, model: Model, seq: Sequence, tokens: tuple[int, ...], depth: LayerSelection, want: ReadSpec
    ) -> Readout:
        """Read the grouped layers after drafted tokens, the last of them not fed before."""
        if not self.calibrates:
            return await self._go_on(model, seq, depth, want, tokens)
        [row] = await model.partial_forward(seq, Sketch.chain(len(seq), tokens, len(tokens) - 1, depth), want)
        return row

    async def _go_on(
        self, model: Model, seq: Sequence, depth: LayerSelection, want: ReadSpec, tokens: tuple[int, ...] = ()
    ) -> Readout:
        """Read the grouped layers after they have read the whole answer: only the prompt was read exactly."""
        self._began = self._began or len(seq) - 1
        fed = (*seq.tokens[self._began :], *tokens)
        start = _common(self._run[: len(fed) - 1], fed)
        self._run = fed
        rows = await model.partial_forward(seq, Sketch.chain(self._began, fed, start, depth), want)
        return rows[-1]


def grouped(num_layers: int, params: EasySpecParams) -> tuple[tuple[int, int], ...]:
    """Groups of a model's layers, [start, stop) each: the last one may be smaller, and none has a single layer."""
    end = num_layers - params.exact_last
    starts = range(params.exact_first, end, params.group)
    return tuple((start, min(start + params.group, end)) for start in starts if min(params.group, end - start) > 1)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


PART = EasySpecDrafter
