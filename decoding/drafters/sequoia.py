"""A tree of the shape with the most expected tokens for its cost, drawn without replacement."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from decoding.draft_trees import GrowingTree, grow_planned
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import LengthPolicy
from decoding.sequence import Sequence
from decoding.tree import ROOT, DraftTree
from decoding.tree_plans import MOST_WORK, PlanTable, TreePlan, table_work
from turnout.errors import invalid
from turnout.registry import MethodParams

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.verifiers.base import VerifyResult

MOST_RANKS = 32
# Times are compared at this context: what they depend on is mostly the number of tokens fed.
NOMINAL_CONTEXT = 1024
TIMED_NODES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Times are also taken for these numbers of sequences, each verifying the same number of nodes.
TIMED_SEQUENCES = (1, 4, 16, 64)
# Nodes judged after which a shape is computed again.
REPLAN_AFTER = 64
# A table that takes more is made in a thread of its own: no other request's tokens may wait for it.
MADE_AT_ONCE = 1 << 19
PRIOR_WEIGHT = 16


class SequoiaParams(MethodParams):
    """Parameters of `sequoia`."""

    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS, description="most children of a node")] = 8
    memory: Annotated[int, Field(ge=1, le=1_000_000, description="nodes the acceptance rates are averaged over")] = 1000
    beyond: Annotated[
        Literal["likely", "uniform"],
        Field(
            description="further children where the distribution has no more tokens: the likeliest of those it left"
            " out, or any of them"
        ),
    ] = "likely"


class AcceptanceRates:
    """Acceptance rates of the k-th sibling, given that the earlier ones were refused: moving averages.

    Args:
        ranks: number of sibling ranks with a rate of their own.
        memory: nodes averaged over.

    Attributes:
        judged: nodes whose children were judged so far.
        table: of the shapes at the rates when `table_age` times `REPLAN_AFTER` nodes were judged; None: none yet.
    """

    def __init__(self, ranks: int, memory: int) -> None:
        self.table: PlanTable | None = None
        self.table_age = 0
        self._rates = [0.6 * 0.25**rank for rank in range(ranks)]
        self._seen = [0] * ranks
        self._memory = memory
        self.judged = 0

    def add(self, children: int, accepted: int | None) -> None:
        """A node's children were judged.

        Args:
            children: how many it had; later ranks learn nothing.
            accepted: rank of the one taken, None if all were refused.
        """
        self.judged += 1
        for rank in range(min(children, len(self._rates))):
            self._seen[rank] += 1
            weight = 1.0 / min(self._seen[rank] + PRIOR_WEIGHT, self._memory)
            self._rates[rank] += weight * ((rank == accepted) - self._rates[rank])

    @property
    def nbytes(self) -> int:
        """About the bytes it holds."""
        return 0 if self.table is None else self.table.nbytes

    async def planned(self, nodes: int, depth: int) -> PlanTable:
        """Return a table of shapes up to `nodes` and `depth`; it serves all smaller budgets until its rates are old."""
        table, age = self.table, self.judged // REPLAN_AFTER
        if table is not None and self.table_age == age:
            if table.nodes >= nodes and table.depth >= depth:
                return table
            # Requests that take turns with rooms of their own share one.
            grown = max(table.nodes, nodes), max(table.depth, depth)
            if table_work(len(self._rates), *grown) <= MOST_WORK:
                nodes, depth = grown
        if table_work(len(self._rates), nodes, depth) <= MADE_AT_ONCE:
            table = PlanTable(self.rates, nodes, depth)
        else:
            table = await asyncio.to_thread(PlanTable, self.rates, nodes, depth)
        self.table, self.table_age = table, age
        return table

    @property
    def rates(self) -> list[float]:
        """By rank; they add up to one at most, also where the later ranks were seen in fewer rounds."""
        left, rates = 1.0, []
        for rate in self._rates:
            rates.append(min(rate, left))
            left -= rates[-1]
        return rates


class SequoiaDrafter(Drafter):
    """Optimal trees (paper #46, Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding).

    The shape comes from a dynamic program over acceptance rates by rank among siblings, measured while serving for
    each tenant and pair of models, greedy and sampled requests apart. Its size and depth are those with the least
    time per expected token given the sequences that the target works on at the moment, or, as long as the models do
    not know their times, the largest that fit. Where fewer tokens are possible than a node was to have children, the
    paper continues uniformly over the others (`beyond`); the likeliest of them serve better, and
    make the paper's tree of the greedy case.
    """

    Params = SequoiaParams
    papers = (46,)
    runs_on = "small"
    kinds = frozenset({Candidates.DRAWN})
    stepwise = True
    depth = 10
    nodes = 64
    params: SequoiaParams

    def __init__(self, params: SequoiaParams | None = None, candidates: Candidates | None = None) -> None:
        super().__init__(params, candidates)
        self._target = ""
        self._draft_s: list[float] = []
        self._target_s: list[list[float]] = []
        self._nodes = self._depth = 0  # largest room so far: an answer's last rounds have ever less
        self._plan = TreePlan(())
        self._planned_for: tuple[PlanTable, int, int, int] | None = None
        self._draft: DraftTree | None = None

    def check(self, models: ModelPool) -> None:
        """Refuses nothing; takes down what forwards of the two models cost."""
        self._target = models.large.name

        def seconds(model: Model, sequences: int, nodes: int) -> float:
            fed = sequences * (nodes + 1)
            return model.forward_seconds(fed, fed * NOMINAL_CONTEXT, sequences)

        self._draft_s = [seconds(models.small, each, 0) for each in TIMED_SEQUENCES]
        self._target_s = [[seconds(models.large, each, nodes) for nodes in TIMED_NODES] for each in TIMED_SEQUENCES]

    def check_room(self, room: DraftBudget, field: str) -> None:
        """Refuse what takes too long to plan."""
        ranks = self.params.ranks
        if table_work(ranks, room.nodes, room.depth) > MOST_WORK:
            raise invalid(
                field,
                f"sequoia plans in ranks x depth x nodes^2 = {ranks} x {room.depth} x {room.nodes}^2 steps, more than"
                f" {MOST_WORK}; ask for fewer nodes or ranks, or for a smaller draft_length",
            )

    async def propose(self, model: Model, seq: Sequence, room: DraftBudget, length: LengthPolicy) -> DraftTree:
        """The tree of the present plan."""
        self._nodes, self._depth = max(self._nodes, room.nodes), max(self._depth, room.depth)
        table = await self._rates(model, seq).planned(self._nodes, self._depth)
        crowd = min(bisect_left(TIMED_SEQUENCES, room.sequences), len(TIMED_SEQUENCES) - 1)
        wanted = (table, room.depth, room.nodes, crowd)
        if wanted != self._planned_for:
            self._planned_for = wanted
            self._plan = self._best(table, room, crowd)
        self._draft = await grow_planned(GrowingTree(model, seq, length), self._plan, self.params.beyond)
        return self._draft

    def observe(self, model: Model, seq: Sequence, draft: DraftTree, verdict: VerifyResult) -> None:
        """Count the outcome at every node the verifier came to."""
        if draft is not self._draft:
            return
        rates = self._rates(model, seq)
        path = [*verdict.path, None]
        for node, taken in zip([ROOT, *verdict.path], path, strict=True):
            children = draft.children(node)
            if children:
                rates.add(len(children), None if taken is None else children.index(taken))

    def _rates(self, model: Model, seq: Sequence) -> AcceptanceRates:
        law = "greedy" if seq.sampling.greedy else "sampled"
        ranks, memory = self.params.ranks, self.params.memory
        kind = f"sequoia/{law}/{ranks}/{memory}/{self.params.beyond}/{self._target}"
        return model.stores.open(kind, seq.learner, lambda: AcceptanceRates(ranks, memory))

    def _best(self, table: PlanTable, room: DraftBudget, crowd: int) -> TreePlan:
        draft_s, target_s = 0.0, [0.0] * (room.nodes + 1)
        if self._target_s and min(self._target_s[crowd]) > 0.0:
            draft_s = self._draft_s[crowd]
            target_s = np.interp(range(room.nodes + 1), TIMED_NODES, self._target_s[crowd]).tolist()
        return table.plan(*table.best_size(draft_s, target_s, room.depth))


PART = SequoiaDrafter
