"""Fitting a small head to examples in memory: seeded, and resumable after every epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from training.checkpoint import Checkpoint, Progress

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        epochs: passes over the examples.
        batch_size: examples of a step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        seed: of the order of examples.
    """

    epochs: int = 20
    batch_size: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0


def fit(
    head: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    loss: Loss,
    schedule: Schedule,
    checkpoint: Path | None = None,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> list[float]:
    """Train a head in place; an interrupted run goes on where its checkpoint stands and ends the same.

    Args:
        head: inputs [n, ...] -> what `loss` takes.
        inputs: one row per example.
        labels: [n].
        loss: of (outputs, labels) of a batch, a scalar.
        schedule: see there.
        checkpoint: where to keep the state after every epoch; None: nowhere.
        on_epoch: told the number of finished epochs and the mean loss of the last.

    Returns:
        Mean loss of each epoch.
    """
    optimiser = torch.optim.AdamW(
        head.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay, betas=(0.9, 0.95)
    )
    progress = Progress()
    if checkpoint is not None and checkpoint.exists():
        stored = Checkpoint.load(checkpoint)
        head.load_state_dict(stored.model)
        optimiser.load_state_dict(stored.optimiser[0])
        progress = stored.progress
    while progress.step < schedule.epochs:
        # The order follows from the epoch alone, so that a resumed run needs no state of a generator.
        order = torch.Generator().manual_seed(schedule.seed * 1_000_003 + progress.step)
        total = 0.0
        shuffled = torch.randperm(len(inputs), generator=order)
        for start in range(0, len(inputs), schedule.batch_size):
            batch = shuffled[start : start + schedule.batch_size]
            optimiser.zero_grad()
            value = loss(head(inputs[batch]), labels[batch])
            value.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += value.item() * len(batch)
        progress.step += 1
        progress.history.append({"loss": total / len(inputs)})
        if checkpoint is not None:
            Checkpoint(head.state_dict(), [optimiser.state_dict()], progress).save(checkpoint)
        on_epoch(progress.step, progress.history[-1]["loss"])
    return [each["loss"] for each in progress.history]
