"""A step time that is known exactly: what scheduling tests predict with, and clocks that run by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.costs.forward import attended_positions
from engine.model import EngineModel
from engine.runner import Feed


@dataclass
class LinearTime:
    """base + per_token x fed + per_position x attended + per_sequence x sequences, seconds."""

    base: float = 0.0
    per_token: float = 1.0
    per_position: float = 0.0
    per_sequence: float = 0.0
    observed: list[tuple[int, int, int]] = field(default_factory=list)

    def seconds(self, fed: int, attended: int, sequences: int) -> float:
        return self.base + self.per_token * fed + self.per_position * attended + self.per_sequence * sequences

    def observe(self, fed: int, attended: int, sequences: int, seconds: float) -> None:
        self.observed.append((fed, attended, sequences))

    def of(self, feeds: Sequence[Feed]) -> float:
        """Seconds of a forward."""
        attended = sum(attended_positions(len(feed.table), len(feed.tokens)) for feed in feeds)
        return self.seconds(sum(len(feed.tokens) for feed in feeds), attended, len(feeds))


class Clock:
    """Stands still but for forwards, each of which takes exactly what `times` says.

    Attributes:
        now: seconds.
        steps: every forward so far: when it ended, and what was fed.
    """

    def __init__(self, times: LinearTime) -> None:
        self.times = times
        self.now = 0.0
        self.steps: list[tuple[float, list[Feed]]] = []

    def drive(self, model: EngineModel) -> None:
        """Let a model plan by `times`, and its forwards move the clock."""
        model.batcher.times = self.times
        original = model.batcher.runner.run

        def run(feeds: Sequence[Feed]) -> Any:
            rows = original(feeds)
            self.now += self.times.of(feeds)
            self.steps.append((self.now, list(feeds)))
            return rows

        model.batcher.runner.run = run  # type: ignore[method-assign]
