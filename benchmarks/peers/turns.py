"""One workload on several engines that take turns, with the CPU time of those that wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.harness import Side, take_turns
from benchmarks.peers.remote import PeerError
from benchmarks.peers.workloads import Generator, Workload
from experiments.process_cpu import busy_seconds
from experiments.stats.intervals import Interval, spread

SAME_TOKENS = 1  # leading tokens of an answer that are compared: later ones follow from the first near-tie


class Contender(Generator, Protocol):
    """A peer whose own CPU time can be read, which shows whether it rests while others work."""

    def cpu_seconds(self) -> float:
        """CPU time used so far."""
        ...


@dataclass(slots=True)
class Outcome:
    """One workload on several engines.

    Attributes:
        ours: the engine that the others are compared with.
        values: by engine, one number a round, in the order of the rounds.
        failures: by engine, why it has no numbers.
        agreement: by engine, share of answers that begin with the same token as our engine's.
        waiting_cpu: most cores that engines waiting for their turn used together, over a turn.
        foreign_cpu: most cores that everything else on the machine used, over a turn.
    """

    workload: str
    unit: str
    ours: str
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    waiting_cpu: float = 0.0
    foreign_cpu: float = 0.0

    def spread(self, engine: str) -> Interval:
        """Median and extremes of an engine's rounds."""
        return spread(self.values[engine])

    def ratio(self, other: str, ours: str | None = None) -> Interval:
        """Median and extremes of ours, or of another of our settings, over another engine, round by round."""
        pairs = zip(self.values[ours or self.ours], self.values[other], strict=True)
        return spread([mine / theirs for mine, theirs in pairs])


async def measure(workload: Workload, engines: Mapping[str, Contender], ours: str, rounds: int) -> Outcome:
    """Measure a workload on engines that take turns; one that fails leaves the workload with its reason."""

    def side(name: str) -> Side[_Reading]:
        async def turn(number: int) -> _Reading:
            before = _Cpu.now(engines)
            reading = workload.measure(engines[name], number)
            starts = [tuple(answer[:SAME_TOKENS]) for answer in reading.answers]
            return _Reading(reading.value, starts, *_Cpu.now(engines).since(before, name))

        return Side(name, turn)

    turns = await take_turns([side(name) for name in engines], rounds, may_fail=(PeerError, ValueError))
    outcome = Outcome(workload.name, workload.unit, ours, failures=dict(turns.failures))
    starts = {name: [start for each in found for start in each.starts] for name, found in turns.readings.items()}
    for name, found in turns.readings.items():
        outcome.values[name] = [each.value for each in found]
        outcome.waiting_cpu = max([outcome.waiting_cpu, *(each.waiting_cpu for each in found)])
        outcome.foreign_cpu = max([outcome.foreign_cpu, *(each.foreign_cpu for each in found)])
        if ours in starts:
            outcome.agreement[name] = _agreement(starts[ours], starts[name])
    return outcome


@dataclass(frozen=True, slots=True)
class _Reading:
    """A figure, how each answer begins, and the cores used meanwhile by engines that waited and by other programs."""

    value: float
    starts: list[tuple[int, ...]]
    waiting_cpu: float
    foreign_cpu: float


@dataclass(frozen=True, slots=True)
class _Cpu:
    """CPU time used up to a moment by the machine and by each engine, seconds."""

    at: float
    machine: float
    engines: dict[str, float]

    @classmethod
    def now(cls, engines: Mapping[str, Contender]) -> _Cpu:
        used = {name: engine.cpu_seconds() for name, engine in engines.items()}
        return cls(time.monotonic(), busy_seconds(), used)

    def since(self, before: _Cpu, working: str) -> tuple[float, float]:
        """Cores used since then by engines that waited, and by everything that is no engine."""
        wall = self.at - before.at
        used = {name: seconds - before.engines[name] for name, seconds in self.engines.items()}
        foreign = self.machine - before.machine - sum(used.values())
        return (sum(used.values()) - used[working]) / wall, max(foreign, 0.0) / wall


def _agreement(mine: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> float:
    return sum(a == b for a, b in zip(mine, theirs, strict=True)) / len(mine)
