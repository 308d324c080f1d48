"""One way of answering a set of problems, run on a pool and measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from experiments.stats.intervals import Interval, bootstrap_mean, wilson
from pool.local_pool import LocalPool
from training.calibration_data import Question
from training.data.arithmetic import is_correct
from training.data.problem import Problem
from turnout.calls import ChatMessage, Chunk, GenerateCall, TokenOut, Usage
from turnout.types import SamplingParams

T = TypeVar("T")
Asked = Problem | Question  # of arithmetic, or with a judge of its own


@dataclass(frozen=True, slots=True)
class Arm:
    """A method with parameters, under a name for the report, and the temperature of its answers."""

    name: str
    method: str
    params: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One problem's answer under one arm.

    Attributes:
        correct: how much of it is right, 0 to 1.
    """

    correct: float
    text: str
    tokens: tuple[TokenOut, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ArmResult:
    """All outcomes of an arm, in problem order; `wall_s` and `cpu_s` are the whole set's, in seconds.

    Attributes:
        cpu_s: processor time of this process, which other processes disturb less than the clock.
    """

    arm: Arm
    outcomes: tuple[Outcome, ...]
    wall_s: float
    cpu_s: float = 0.0

    @property
    def correct(self) -> npt.NDArray[np.float64]:
        """How much of each answer is right, 0 to 1."""
        return np.array([float(outcome.correct) for outcome in self.outcomes])

    @property
    def accuracy(self) -> Interval:
        """Mean of `correct`: Wilson's interval where answers are right or wrong, else a bootstrap over prompts."""
        correct = self.correct
        if np.isin(correct, (0.0, 1.0)).all():
            return wilson(int(correct.sum()), len(correct))
        return bootstrap_mean(correct, seed=0)

    @property
    def large_share(self) -> float:
        """Tokens the large model wrote, dropped ones included, per token of the answers."""
        return self._per_token([outcome.usage.cost.large_share for outcome in self.outcomes])

    @property
    def large_kept_share(self) -> float:
        """Share of the answers' tokens that the large model wrote."""
        return self._per_token([outcome.usage.cost.large_kept_share for outcome in self.outcomes])

    @property
    def paper_cost(self) -> float:
        """Parameters charged per token written, relative to the large model alone."""
        return self._per_token([outcome.usage.cost.spent.paper for outcome in self.outcomes])

    @property
    def flops(self) -> float:
        """2 x parameters x processed tokens, summed."""
        return sum(outcome.usage.cost.spent.flops for outcome in self.outcomes)

    @property
    def mean_run(self) -> float:
        """Mean length of a maximal run of one model, in tokens."""
        tokens = sum(len(outcome.tokens) for outcome in self.outcomes)
        return tokens / sum(_runs(outcome.tokens) for outcome in self.outcomes)

    def _per_token(self, values: list[float]) -> float:
        """Mean of a value of each answer, weighted by the answer's tokens."""
        tokens = [outcome.usage.completion_tokens for outcome in self.outcomes]
        return sum(value * count for value, count in zip(values, tokens, strict=True)) / sum(tokens)


def _runs(tokens: tuple[TokenOut, ...]) -> int:
    return 1 + sum(before.source != after.source for before, after in pairwise(tokens))


async def answer(pool: LocalPool, problem: Asked, arm: Arm, number: int, max_tokens: int) -> Outcome:
    """Answer one problem; `number` seeds whatever the method draws."""
    sampling = SamplingParams(temperature=arm.temperature, max_tokens=max_tokens, seed=number)
    messages = (ChatMessage("user", problem.prompt),)
    call = GenerateCall(
        f"{arm.name}-{number}", pool.name, sampling, messages=messages, method=arm.method, params=arm.params
    )
    text, usage = "", None
    tokens: list[TokenOut] = []
    async for event in pool.generate(call):
        if isinstance(event, Chunk):
            text += event.text
            tokens.extend(event.tokens)
        elif isinstance(event, Usage):
            usage = event
    assert usage is not None
    return Outcome(_share_right(problem, text), text, tuple(tokens), usage)


def _share_right(asked: Asked, text: str) -> float:
    if isinstance(asked, Problem):
        return float(is_correct(asked, text))
    assert asked.judge is not None
    return asked.judge(text)


async def run_arm(
    pool: LocalPool, problems: Sequence[Asked], arm: Arm, concurrency: int = 16, max_tokens: int = 160
) -> ArmResult:
    """Answer every problem, `concurrency` at a time."""
    for engine in pool.engines.values():
        engine.pool.clear_cached()
    work = (answer(pool, problem, arm, number, max_tokens) for number, problem in enumerate(problems))
    started, worked = time.perf_counter(), time.process_time()
    outcomes = await at_once(work, concurrency)
    return ArmResult(arm, tuple(outcomes), time.perf_counter() - started, time.process_time() - worked)


async def at_once(work: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
    """Do all of it, `concurrency` pieces at a time; results in order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(piece: Coroutine[Any, Any, T]) -> T:
        async with slots:
            return await piece

    return list(await asyncio.gather(*(one(piece) for piece in work)))
