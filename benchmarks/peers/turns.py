"""Taking turns: every engine does the same work in each round, one at a time, in an order that rotates."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.harness import turn_order
from benchmarks.peers.remote import PeerError
from benchmarks.peers.workloads import Generator, Workload
from experiments.process_cpu import busy_seconds
from experiments.stats.intervals import Interval, spread

SAME_TOKENS = 1  # leading tokens of an answer that are compared: later ones follow from the first near-tie


class Contender(Generator, Protocol):
    """A peer whose own CPU time can be read, so that it is seen to rest while others work."""

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


def take_turns(workload: Workload, engines: Mapping[str, Contender], ours: str, rounds: int) -> Outcome:
    """Measure a workload; one more round than asked for warms everybody up and is thrown away.

    An engine that fails leaves the workload with its reason; the others go on.
    """
    outcome = Outcome(workload.name, workload.unit, ours)
    starts: dict[str, list[tuple[int, ...]]] = {}
    for number, name in turn_order(list(engines), rounds):
        if name in outcome.failures:
            continue
        before = _Cpu.now(engines)
        try:
            reading = workload.measure(engines[name], number)
        except (PeerError, ValueError) as error:
            outcome.failures[name] = str(error)
            outcome.values.pop(name, None)
            starts.pop(name, None)
            continue
        if number:
            waiting, foreign = _Cpu.now(engines).since(before, name)
            outcome.waiting_cpu = max(outcome.waiting_cpu, waiting)
            outcome.foreign_cpu = max(outcome.foreign_cpu, foreign)
            outcome.values.setdefault(name, []).append(reading.value)
            starts.setdefault(name, []).extend(tuple(answer[:SAME_TOKENS]) for answer in reading.answers)
    outcome.agreement = {name: _agreement(starts[ours], starts[name]) for name in starts if ours in starts}
    return outcome


@dataclass(frozen=True, slots=True)
class _Cpu:
    """Who has used how much CPU time up to a moment, seconds."""

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
