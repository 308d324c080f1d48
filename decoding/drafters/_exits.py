"""Drafters that leave the target early: a trained head drafts from the states behind its first layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field

from decoding.artifacts import Artifact
from decoding.drafters._heads import HeadParams, TrainedDrafter
from decoding.drafters.base import NOTHING, Candidates, DraftBudget
from decoding.exit_heads import ExitCache, ExitHead
from decoding.lengths.base import LengthPolicy, Step
from decoding.model import ReadSpec
from decoding.partial_drafts import chain_proposals, draft_want, exit_chain, exit_states
from decoding.partial_forward import Exit
from decoding.sequence import Sequence
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.verifiers.base import VerifyResult


class ExitParams(HeadParams):
    """Parameters that they share."""

    context: Annotated[int, Field(ge=1, le=65_536, description="places before a draft that the head sees at least")] = (
        1024
    )


class ExitDrafter(TrainedDrafter[ExitHead]):
    """A chain by the target's first layers and a head that has keys and values of its own.

    The layers run once for every token, those of the draft included: verification continues behind them. The head has
    a row for every place up to the last drafted token but one. What it gets of the prompt, and of tokens that others
    drafted, is what verification read there; only places whose keys and values the target found in its cache are run
    through the first layers once more. The first round of an answer drafts nothing: its forward reads the prompt.
    """

    network = ExitHead
    kinds = frozenset({Candidates.FIXED, Candidates.DRAWN})
    stepwise = True
    params: ExitParams

    def __init__(self, params: Any = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._cache: ExitCache | None = None
        self._seen: list[tuple[int, torch.Tensor]] = []  # places, and states there, that the head has not been given
        self._drafted: tuple[int, ...] = ()

    def use(self, head: ExitHead, artifact: Artifact) -> None:
        """See `TrainedDrafter.use`."""
        super().use(head, artifact)
        self.layer: int = artifact.settings["exit_layer"]
        at_exit = frozenset({self.layer})
        self.want = ReadSpec(draw=None, hidden=at_exit, before=at_exit)

    def check(self, models: ModelPool) -> None:
        """See `TrainedDrafter.check`."""
        super().check(models)
        self._share = self.layer / models.large.num_layers

    @property
    def share(self) -> float:
        """The layers before the exit; the head is small."""
        return self._share

    @abstractmethod
    def continues(self, path: Path[Step]) -> bool:
        """Return whether to draft on below a token, in addition to the length policy."""

    def begin(self, model: Model, seq: Sequence) -> None:
        """A round begins."""

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """A chain; nothing before the first verification."""
        if not self._seen or len(seq) < 2:
            return DraftTree.empty(model.name)
        cache, waiting = await self._catch_up(model, seq)
        self.begin(model, seq)
        want = draft_want(self.candidates) | ReadSpec(draw=None, top=1) | length.want
        root = len(seq) - 1

        def exits(depth: int) -> Exit:
            before = waiting if depth == 0 else []

            def exit(states: torch.Tensor) -> torch.Tensor:
                cache.truncate(root + depth - sum(map(len, before)))
                return self.head.extend(torch.cat([*before, states]), cache)[-1:]

            return exit

        def continues(path: Path[Step]) -> bool:
            return self.continues(path) and length.continues(path)

        most = min(room.depth, room.nodes)
        draft = await exit_chain(model, seq, self.layer, most, (want, NOTHING), continues, exits)
        self._drafted = tuple(step.token for step in draft.path)
        proposals = chain_proposals(draft.path) if self.candidates is Candidates.DRAWN else None
        return DraftTree.chain(list(self._drafted), model.name, proposals)

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Keep the states of accepted tokens, and no row of others, by whichever drafter they were drafted."""
        accepted = tuple(draft.tokens[node] for node in verdict.path)
        # An end of the answer inside the round cuts tokens: nothing follows then.
        root = len(seq) - len(accepted) - 2
        if self._cache is not None:
            self._cache.truncate(root + 1 + _common(self._drafted, accepted))
        self._drafted = ()
        rows = [verdict.rows[0], *(verdict.rows[node + 1] for node in verdict.path)]
        before = rows[0].before.get(self.layer)
        if before is not None and len(before):
            self._keep(root - len(before), before)
        read = {place: row.hidden[self.layer] for place, row in enumerate(rows, root) if self.layer in row.hidden}
        if len(read) == len(rows):
            self._keep(root, torch.stack(list(read.values())))
            return
        for place, state in read.items():  # another drafter's deeper exit was verified
            self._keep(place, state[None])

    def _keep(self, place: int, states: torch.Tensor) -> None:
        self._seen.append((place, states.to("cpu", torch.float32, copy=True)))

    async def _catch_up(self, model: Model, seq: Sequence) -> tuple[ExitCache, list[torch.Tensor]]:
        """The head's cache, and the states it lacks before the sequence's last token."""
        stop = len(seq) - 1
        if self._cache is None or stop - self._cache.end > self.params.context:
            self._cache = self.head.cache(max(0, stop - self.params.context))
        at, waiting = self._cache.end, []
        for place, states in (*self._seen, (stop, None)):
            if place > at:
                waiting.append(await exit_states(model, seq, self.layer, at, place))
                at = place
            if states is not None and place + len(states) > at:
                waiting.append(states[at - place :])
                at = place + len(states)
        # Kept until the next verification adds to it: something has been seen.
        self._seen = self._seen[-1:]
        return self._cache, waiting


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
