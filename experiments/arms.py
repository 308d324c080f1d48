"""One way of answering a set of problems, run on a pool and measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.pool import LocalPool
from training.data.arithmetic import is_correct
from training.data.problem import Problem
from turnout.calls import ChatMessage, Chunk, GenerateCall, TokenOut, Usage
from turnout.types import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arm:
    """A method with parameters, under a name for the report."""

    name: str
    method: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One problem's answer under one arm."""

    correct: bool
    text: str
    tokens: tuple[TokenOut, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ArmResult:
    """All outcomes of an arm, in problem order; `wall_s` is the whole set's, seconds."""

    arm: Arm
    outcomes: tuple[Outcome, ...]
    wall_s: float

    @property
    def correct(self) -> npt.NDArray[np.float64]:
        """1.0 where the answer is right."""
        return np.array([float(outcome.correct) for outcome in self.outcomes])

    @property
    def large_share(self) -> float:
        """Share of all generated tokens that the large model wrote."""
        tokens = sum(outcome.usage.completion_tokens for outcome in self.outcomes)
        large = sum(outcome.usage.cost.large_share * outcome.usage.completion_tokens for outcome in self.outcomes)
        return large / tokens

    @property
    def paper_cost(self) -> float:
        """Parameters charged per token written, relative to the large model alone."""
        tokens = sum(outcome.usage.completion_tokens for outcome in self.outcomes)
        return sum(o.usage.cost.spent.paper * o.usage.completion_tokens for o in self.outcomes) / tokens

    @property
    def flops(self) -> float:
        """2 x parameters x processed tokens, summed."""
        return sum(outcome.usage.cost.spent.flops for outcome in self.outcomes)

    @property
    def mean_run(self) -> float:
        """Mean length of a maximal run of one model, in tokens."""
        tokens = sum(len(outcome.tokens) for outcome in self.outcomes)
        return tokens / sum(_runs(outcome.tokens) for outcome in self.outcomes)


def _runs(tokens: tuple[TokenOut, ...]) -> int:
    return 1 + sum(before.source != after.source for before, after in pairwise(tokens))


async def answer(pool: LocalPool, problem: Problem, arm: Arm, number: int, max_tokens: int) -> Outcome:
    """Answer one problem greedily; `number` seeds whatever the method draws."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=number)
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
    return Outcome(is_correct(problem, text), text, tuple(tokens), usage)


async def run_arm(
    pool: LocalPool, problems: list[Problem], arm: Arm, concurrency: int = 16, max_tokens: int = 160
) -> ArmResult:
    """Answer every problem, `concurrency` at a time."""
    for engine in pool.engines.values():
        engine.pool.clear_cached()
    work = (answer(pool, problem, arm, number, max_tokens) for number, problem in enumerate(problems))
    started = time.perf_counter()
    outcomes = await at_once(work, concurrency)
    return ArmResult(arm, tuple(outcomes), time.perf_counter() - started)


async def at_once(work: Iterable[Coroutine[Any, Any, T]], concurrency: int) -> list[T]:
    """Do all of it, `concurrency` pieces at a time; results in order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(piece: Coroutine[Any, Any, T]) -> T:
        async with slots:
            return await piece

    return list(await asyncio.gather(*(one(piece) for piece in work)))
