"""Best-first search over reasoning steps: the answer that has cost least and promises most is continued."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from decoding.decode_loop import stream
from decoding.model import Model, ModelPool, ReadSpec, Request, StopCondition
from decoding.noise import derive_seed, round_seed
from decoding.rollouts import Branches, branches_of
from decoding.scorers.base import PACKAGE as SCORERS
from decoding.scorers.base import Scorer
from decoding.sequence import Sequence
from decoding.steps import StepEnd, StepRule, step_marks
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment

FIELD = "method.params"
Mark = Annotated[str, Field(min_length=1, max_length=64)]


class AStarParams(MethodParams):
    """Parameters of `a_star`."""

    example: ClassVar[Mapping[str, Any]] = {
        "separators": [" "],
        "max_step_tokens": 4,
        "max_search_tokens": 32,
        "scorer": {"name": "self_grade", "reading": "expected", "question": "grade"},
    }
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    scorer: Annotated[
        PartChoice,
        Field(
            description="gives the reward of a step: reward_model, self_grade; `turnout parts scorers`",
            json_schema_extra={"x-slot": "scorers"},
        ),
    ] = PartChoice(name="self_grade")
    samples: Annotated[int, Field(ge=1, le=16, description="steps drawn after each answer that is continued")] = 3
    step_cost: Annotated[
        Literal["change", "none"],
        Field(
            description="cost of a step: how far the reward changes with it; or none, so that the last reward decides"
        ),
    ] = "change"
    separators: Annotated[
        tuple[Mark, ...], Field(min_length=1, max_length=16, description="strings that end a step")
    ] = ("\n",)
    max_step_tokens: Annotated[int, Field(ge=1, le=4096, description="longest step, tokens")] = 512
    max_search_tokens: Annotated[
        int, Field(ge=1, le=1 << 20, description="tokens that may be written in the search, thrown away or not")
    ] = 8192
    max_scores: Annotated[int, Field(ge=1, le=4096, description="steps that may be given a reward")] = 256

    @model_validator(mode="after")
    def _check_scorer(self) -> Self:
        self.judge()
        return self

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        self.judge().check(models)

    def judge(self) -> Scorer:
        """The scorer.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: an unknown scorer, or a wrong parameter of it.
        """
        scorer: Scorer = self.scorer.make(SCORERS, f"{FIELD}.scorer")
        return scorer


@method(params=AStarParams, papers=(134,), lossless=False, needs=frozenset())
async def a_star(request: Request, models: ModelPool, params: AStarParams) -> AsyncIterator[Segment]:
    """Steps are drawn after the most promising of all answers begun so far, until that one is a whole answer.

    Paper #134 (A*-decoding). For an answer s with the reward r(s), from 0 to 1, of its last step, h(s) = 1 - r(s) is
    what is missing, and g(s) the sum of the costs of its steps: |r(s') - r(s)|, with r = 1 before the first (our
    choice: no source gives the paper's). The answer of the least g + h is continued, the earliest of equals, however
    long it and others are; if it has ended, it is shown. Equal steps after one answer are one. Where the tokens or
    rewards of the search are used up, the ended answer of the greatest reward is shown, or else the most promising one
    is written to its end. At temperature 0 all steps would be the same, and it is plain decoding. Nothing is shown
    before all is written; a request that is made again begins anew.
    """
    model, seq = models.by_role(params.model), request.sequence
    if seq.sampling.greedy:
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    scorer = params.judge()
    scorer.check(models)
    marks = await asyncio.to_thread(step_marks, models.tokenizer, model.vocab_size, params.separators)
    await model.extend(seq, want=ReadSpec(draw=None))  # its forks share what it has cached
    with branches_of(seq, list(models.models.values())) as branches:
        search = AStar(model, models, branches, params, scorer, StepEnd(marks, params.separators))
        best = await search.run(seq)
        request.extra["a_star"] = search.report(best)
        if not best.seq.finished:
            await model.decode(best.seq)
        segment = branches.show(best.seq, models)
    yield segment


@dataclass(slots=True, eq=False)
class Node:
    """Answer in the making.

    Attributes:
        seq: its tokens.
        reward: of its last step, from 0 to 1.
        cost: of its steps together, g.
        steps: how many.
    """

    seq: Sequence
    reward: float = 1.0
    cost: float = 0.0
    steps: int = 0

    @property
    def estimate(self) -> float:
        """What it costs, and what is missing: g + h."""
        return self.cost + 1.0 - self.reward


class AStar:
    """Search for one answer.

    Args:
        model: writes steps.
        models: that the scorer reads with.
        branches: of the request's sequence.
        params: of the method.
        scorer: gives rewards.
        end: finds ends of steps.

    Attributes:
        expanded: answers that went on, in their order: (steps, estimate).
        scored: rewards that were given.
        written: tokens.
    """

    def __init__(
        self, model: Model, models: ModelPool, branches: Branches, params: AStarParams, scorer: Scorer, end: StepEnd
    ) -> None:
        self.model = model
        self.params = params
        self.expanded: list[tuple[int, float]] = []
        self.scored = self.written = 0
        self._models = models
        self._branches = branches
        self._scorer = scorer
        self._rule = StepRule(end)
        self._open: list[tuple[float, int, Node]] = []  # a heap
        self._pushed = 0

    async def run(self, seq: Sequence) -> Node:
        """Return the answer found, or the one to be completed."""
        [root] = self._branches.fork(self.model, [seq], [seq.seed])
        self._push(Node(root))
        while True:
            node = self._open[0][2]
            if node.seq.finished:
                return node
            count, length = self._room()
            if not count or not length:
                break
            heapq.heappop(self._open)
            self.expanded.append((node.steps, node.estimate))
            for child in await self._expand(node, count, length):
                self._push(child)
        ended = [node for _, _, node in self._open if node.seq.finished]
        return max(ended, key=lambda node: node.reward) if ended else self._open[0][2]

    def _room(self) -> tuple[int, int]:
        """How many steps may be drawn now, and how long each may be."""
        left = self.params.max_search_tokens - self.written
        count = min(self.params.samples, self.params.max_scores - self.scored, left)
        return count, min(self.params.max_step_tokens, left // max(count, 1))

    async def _expand(self, node: Node, count: int, length: int) -> list[Node]:
        """Draw steps after an answer, and give each different one its reward."""
        seed = round_seed(node.seq.seed, len(self.expanded))
        seeds = [node.seq.seed, *(derive_seed(seed, place) for place in range(1, count))]
        until = StopCondition((self._rule,), length)
        forks = await self._branches.write(self.model, [node.seq] * count, seeds, until)
        different: dict[tuple[int, ...], Sequence] = {}
        for fork in forks:
            step = tuple(fork.tokens[len(node.seq) :])
            self.written += len(step)
            different.setdefault(step, fork)
        kept = set(different.values())
        self._branches.drop([fork for fork in forks if fork not in kept])
        children = []
        for step, fork in different.items():
            score = await self._scorer.score(self._models, node.seq, step)
            self.scored += 1
            reward = min(max(score / self._scorer.greatest, 0.0), 1.0)
            cost = abs(reward - node.reward) if self.params.step_cost == "change" else 0.0
            children.append(Node(fork, reward, node.cost + cost, node.steps + 1))
        self._branches.drop([node.seq])
        return children

    def _push(self, node: Node) -> None:
        # Rounded: a step that raises the reward leaves the sum as it was, but for the last bits.
        heapq.heappush(self._open, (round(node.estimate, 9), self._pushed, node))
        self._pushed += 1

    def report(self, best: Node) -> dict[str, Any]:
        """Return what usage says of the search."""
        return {
            "expanded": len(self.expanded),
            "scored": self.scored,
            "written": self.written,
            "reward": best.reward,
            "estimate": best.estimate,
            "found": best.seq.finished,
        }
