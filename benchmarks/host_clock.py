"""The parts of an engine's steps, timed, around layers that cost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.model import EngineModel

PARTS = ("plan", "launch", "read", "hand out", "account")


@dataclass(slots=True)
class Clock:
    """Time of the parts of steps.

    Attributes:
        seconds: by part.
        steps: forwards.
        forwards_s: time of the free layers, in seconds.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    forwards_s: float = 0.0

    def clear(self) -> None:
        """Begin anew."""
        self.seconds, self.steps, self.forwards_s = dict.fromkeys(PARTS, 0.0), 0, 0.0

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts for a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return timed


class FreeLayers:
    """Layers of a stack that cost nothing but a fixed time asleep; norm and head stay the stack's.

    Args:
        stack: the model's.
        clock: counts the forwards.
        seconds: that a forward takes, without using the processor.
    """

    def __init__(self, stack: Any, clock: Clock, width: int, seconds: float) -> None:
        self._stack, self._clock, self._seconds = stack, clock, seconds
        generator = torch.Generator().manual_seed(0)
        self._states = torch.randn(1, width, generator=generator).to(torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stack, name)

    def hidden(self, layout: Any, *_: Any) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As `Stack.hidden`: the same state after every token, and no layer's output."""
        began = time.perf_counter()
        self._clock.steps += 1
        if self._seconds:
            time.sleep(self._seconds)
        states = self._states.expand(int(layout.starts[-1]), -1).contiguous()
        self._clock.forwards_s += time.perf_counter() - began
        return states, {}


def lighten(model: EngineModel, clock: Clock, seconds: float = 0.0) -> None:
    """Replace a model's layers by free ones, and time the parts of its steps.

    Parts overlap nowhere: `launch` is laying out and the call of the layers, `read` what follows in the runner.
    """
    batcher, runner = model.batcher, model.batcher.runner
    plan = runner.plan
    plan.stack = FreeLayers(plan.stack, clock, plan.width, seconds)
    for owner, name, part in (
        (batcher._builder, "plan", "plan"),
        (batcher, "_apply", "hand out"),
        (batcher, "_take", "hand out"),
        (batcher, "_enter", "hand out"),
        (batcher, "_account", "account"),
        (runner, "_lay_out", "launch"),
        (plan.backend, "step", "launch"),
        (runner, "_deliver", "read"),
        (runner, "_draw", "read"),
    ):
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
