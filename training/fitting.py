"""Fitting a small head to examples in memory: seeded, and resumable bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from training.checkpoint import Checkpoint, Progress
from turnout.errors import invalid

Loss = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        steps: batches in all.
        batch_size: examples of each.
        learning_rate: of AdamW at its highest, after a linear rise.
        warmup_steps: of the rise; 0: none.
        falls: whether it then falls to zero along a cosine; otherwise it stays.
        weight_decay: of AdamW.
        clip: largest norm of the gradient; None: any.
        seed: of first weights and of the order of examples.
    """

    steps: int = 2000
    batch_size: int = 256
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    falls: bool = True
    weight_decay: float = 0.01
    clip: float | None = 0.5
    seed: int = 0

    def ends(self, step: int, elapsed_s: float) -> bool:
        """Return whether no step is left.

        Args:
            step: steps done.
            elapsed_s: time that they took.
        """
        return step >= self.steps

    def lr_at(self, step: int, elapsed_s: float = 0.0) -> float:
        """Learning rate of a step counted from 0; arguments as of `ends`."""
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        fall = 0.5 * (1.0 + math.cos(math.pi * step / self.steps)) if self.falls else 1.0
        return self.learning_rate * rise * fall

    def batches_in(self, count: int) -> int:
        """Number of whole batches in a pass over the examples, at least one."""
        return max(1, count // self.batch_size)


@dataclass(frozen=True)
class TimedSchedule(Schedule):
    """Schedule of a time budget: the rate falls with the time spent, and the last step is the one that spends it.

    A run with it is resumed, but not repeated bit for bit.

    Attributes:
        seconds: of all steps together, interrupted ones included from their last checkpoint on.
    """

    seconds: float = 60.0

    def ends(self, step: int, elapsed_s: float) -> bool:
        """See `Schedule.ends`; there is always one step."""
        return step > 0 and elapsed_s >= self.seconds

    def lr_at(self, step: int, elapsed_s: float = 0.0) -> float:
        """See `Schedule.lr_at`."""
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, elapsed_s / self.seconds))) if self.falls else 1.0
        return self.learning_rate * rise * fall


def fit(
    head: nn.Module,
    loss: Loss,
    count: int,
    schedule: Schedule,
    checkpoint: Path | None = None,
    save_every: int = 200,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train a head in place; an interrupted run continues from its checkpoint and ends bit for bit the same.

    Args:
        head: what learns.
        loss: of the examples with these indices, int64 [b]; a scalar.
        count: examples.
        schedule: see there.
        checkpoint: file for the state; None: none is kept.
        save_every: steps between checkpoints; there is one at the end in any case.
        on_step: called with the number of finished steps and the last one's loss.

    Returns:
        Mean loss of the steps between checkpoints.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a loss is not finite. Nothing is kept of what was learnt from it.
    """
    parameters = list(head.parameters())
    optimiser = torch.optim.AdamW(parameters, weight_decay=schedule.weight_decay, betas=(0.9, 0.95))
    progress = Progress()
    if checkpoint is not None and checkpoint.exists():
        stored = Checkpoint.load(checkpoint)
        head.load_state_dict(stored.model)
        optimiser.load_state_dict(stored.optimiser[0])
        progress = stored.progress
    order = _Order(count, schedule.batch_size, schedule.seed)
    recent: list[float] = []
    while not schedule.ends(progress.step, progress.elapsed_s):
        started = perf_counter()
        for group in optimiser.param_groups:
            group["lr"] = schedule.lr_at(progress.step, progress.elapsed_s)
        value = loss(order.batch(progress.step))
        if not math.isfinite(value.item()):
            at = f"the loss of step {progress.step + 1} is not finite"
            raise invalid("learning_rate", f"is {schedule.learning_rate:g}; {at}, lower it")
        optimiser.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        if schedule.clip is not None:
            nn.utils.clip_grad_norm_(parameters, schedule.clip)
        optimiser.step()
        recent.append(value.item())
        progress.step += 1
        progress.elapsed_s += perf_counter() - started
        if progress.step % save_every == 0 or schedule.ends(progress.step, progress.elapsed_s):
            progress.history.append({"loss": sum(recent) / len(recent)})
            recent = []
            if checkpoint is not None:
                Checkpoint(head.state_dict(), [optimiser.state_dict()], progress).save(checkpoint)
        on_step(progress.step, value.item())
    return [each["loss"] for each in progress.history]


class _Order:
    """Which examples a step sees; it follows from the step alone, so that a resumed run needs no generator's state."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self._count, self._size, self._seed = count, min(batch_size, count), seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> torch.Tensor:
        epoch, place = divmod(step, self._count // self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._count, generator=generator)
        return self._order[place * self._size : (place + 1) * self._size]
