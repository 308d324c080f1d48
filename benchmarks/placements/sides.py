"""A pool in this process and the same in actors, on chosen cores, and how fast they answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.connection import ActorConnection, ConnectionGroup
from actors.pickling import TensorHandle
from actors.pool import ActorPool
from experiments.process_cpu import cpu_seconds
from pool.local_pool import LocalPool
from pool.pool import Pool
from turnout.calls import Failure, GenerateCall, Usage
from turnout.cluster_config import PlacementConfig
from turnout.config import TurnoutConfig
from turnout.types import SamplingParams

START_S = 600.0
SILENCE_S = 60.0  # cores that are shared hold an actor up


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores that the processes may use, and the threads of a forward.

    Attributes:
        name: for the report.
        coordinator: of the process that runs the methods; colocated models run in it.
        small: of the small model's actor.
        large: of the large model's actor.
        threads: of each forward, in both placements.
    """

    name: str
    coordinator: frozenset[int]
    small: frozenset[int]
    large: frozenset[int]
    threads: int


@dataclass(frozen=True, slots=True)
class Work:
    """Requests that are asked at once.

    Attributes:
        label: for the report.
        method: of the requests.
        params: of the method.
        prompts: one a request.
        max_tokens: of each answer, which does not end before.
    """

    label: str
    method: str
    params: dict[str, Any]
    prompts: tuple[str | tuple[int, ...], ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic between processes: bytes to actors, from them, and of tensors from actor to actor."""

    there: int
    back: int
    between: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One piece of work, done once.

    Attributes:
        tokens: of all answers.
        seconds: until the last one ended.
        cores: in use meanwhile, by the coordinator and by each actor.
        accepted: share of the drafted tokens that stayed; None: nothing was drafted.
        traffic: between processes.
    """

    tokens: int
    seconds: float
    cores: tuple[float, ...]
    accepted: float | None
    traffic: Traffic

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Placement:
    """A pool that is measured.

    Args:
        pool: it.
        name: of the pool in its configuration.
    """

    def __init__(self, pool: Pool, name: str) -> None:
        self.pool = pool
        self._name = name
        self._actors = pool.supervisors if isinstance(pool, ActorPool) else ()
        self._pids = (os.getpid(), *(each.card.pid for each in self._actors))
        self._between = 0
        if self._actors:
            self._count(self._actors[0]._exchange)

    async def turn(self, work: Work, number: int) -> Turn:
        """Do a piece of work; each number has seeds of its own."""
        before, cpu, start = self._traffic(), [cpu_seconds([pid]) for pid in self._pids], time.perf_counter()
        usages = await asyncio.gather(*(self._one(work, number, place) for place in range(len(work.prompts))))
        seconds = time.perf_counter() - start
        cores = tuple((cpu_seconds([pid]) - was) / seconds for pid, was in zip(self._pids, cpu, strict=True))
        drafted = sum(usage.speculation.draft_tokens for usage in usages)
        accepted = sum(usage.speculation.accepted_tokens for usage in usages) / drafted if drafted else None
        moved = Traffic(*(now - was for now, was in zip(self._traffic(), before, strict=True)))
        return Turn(sum(usage.completion_tokens for usage in usages), seconds, cores, accepted, moved)

    async def close(self) -> None:
        """End the pool."""
        await self.pool.close()

    async def _one(self, work: Work, number: int, place: int) -> Usage:
        call = GenerateCall(
            f"{work.method}-{number}-{place}",
            self._name,
            SamplingParams(max_tokens=work.max_tokens, ignore_eos=True, seed=1000 * number + place),
            prompt=work.prompts[place],
            method=work.method,
            params=work.params,
        )
        async for event in self.pool.generate(call):
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, Usage):
                return event
        raise AssertionError("an answer ends with its usage")

    def _count(self, exchange: ConnectionGroup) -> None:
        """Note the tensors that one actor sends to another."""
        ship = exchange.ship

        def counted(handles: list[TensorHandle], to: ActorConnection) -> list[tuple[int, int, list[Any]]]:
            self._between += sum(handle.nbytes for handle in handles if handle.owner != to.owner)
            return ship(handles, to)

        exchange.ship = counted  # type: ignore[method-assign]

    def _traffic(self) -> tuple[int, int, int]:
        connections = [each.connection for each in self._actors if each.connection is not None]
        there, back = sum(each.bytes_posted for each in connections), sum(each.bytes_heard for each in connections)
        return there, back, self._between


def open_colocated(config: TurnoutConfig, name: str, cores: Cores) -> Placement:
    """The pool in this process."""
    engine = config.engine.model_copy(update={"threads": cores.threads})
    torch.set_num_threads(cores.threads)
    return Placement(LocalPool.load(name, config.model_copy(update={"engine": engine})), name)


def open_actors(config: TurnoutConfig, name: str, cores: Cores) -> Placement:
    """The pool in actors, each on its cores."""
    placement = PlacementConfig(
        models="actors", cpus=0.5, threads=cores.threads, start_timeout_s=START_S, silence_s=SILENCE_S
    )
    pool = config.pools[name].model_copy(update={"placement": placement})
    opened = ActorPool.load(name, config.model_copy(update={"pools": {**config.pools, name: pool}}))
    for supervisor, where in zip(opened.supervisors, (cores.small, cores.large), strict=True):
        pin(supervisor.card.pid, where)
    return Placement(opened, name)


def pin(pid: int, cores: Iterable[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)
