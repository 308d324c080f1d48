"""Training of draft heads on a frozen model's answers: windows over answers, the loop, and what heads are worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from decoding.length_heads import Head
from training.checkpoint import Checkpoint, Progress
from training.distil import Answers

RANKS = 10


@dataclass(frozen=True)
class Frozen:
    """The ends of the model that heads stand on; nothing of it is trained.

    Attributes:
        embed: token ids -> what goes into the first layer.
        output: states after the last norm -> logits before the cap.
        softcap: bound of the logits; None: none.
    """

    embed: nn.Module
    output: nn.Module
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Frozen:
        """Those of a Hugging Face causal language model."""
        model.eval().requires_grad_(False)
        softcap = getattr(model.config, "final_logit_softcapping", None)
        return cls(model.get_input_embeddings(), model.get_output_embeddings(), softcap)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., vocab]."""
        logits: torch.Tensor = self.output(states)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True)
class Batch:
    """Windows over answers: a state, the token it chose, and the n tokens after that.

    Attributes:
        states: float32 [b, width].
        tokens: int64 [b, 1 + n], the pending token first.
        known: bool [b, n], whether the answer goes so far; where not, the other fields hold anything.
        top_ids: int64 [b, n, k], what the model found most probable in place of each of the n tokens.
        top_logprobs: float32 [b, n, k].
    """

    states: torch.Tensor
    tokens: torch.Tensor
    known: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


class Windows:
    """Every window of some answers that has a token after the pending one.

    Args:
        answers: the data.
        horizon: tokens after the pending one, n.

    Raises:
        ValueError: no answer has two tokens.
    """

    def __init__(self, answers: Answers, horizon: int) -> None:
        self._answers = answers
        self._ahead = torch.arange(horizon + 1)
        ends = answers.lengths.cumsum(0)
        left = ends.repeat_interleave(answers.lengths) - torch.arange(len(answers.tokens)) - 1
        self._starts = left.nonzero().flatten()
        self._left = left
        if not len(self._starts):
            raise ValueError("draft heads learn from answers of at least two tokens")

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, picked: torch.Tensor) -> Batch:
        """Windows by index, int64 [b]."""
        starts = self._starts[picked]
        rows = (starts[:, None] + self._ahead).clamp_(max=len(self._answers.tokens) - 1)
        return Batch(
            states=self._answers.states[starts].float(),
            tokens=self._answers.tokens[rows],
            known=self._ahead[1:] <= self._left[starts, None],
            top_ids=self._answers.top_ids[rows[:, 1:]],
            top_logprobs=self._answers.top_logprobs[rows[:, 1:]],
        )


class Task(Protocol):
    """What is trained."""

    @property
    def head(self) -> Head:
        """The only thing with gradients."""
        ...

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the loss at each of n depths, the nearest token's first."""
        ...

    def predict(self, batch: Batch) -> torch.Tensor:
        """Logits of each of the n tokens: [b, n, vocab]; a head that sees earlier tokens is shown the true ones."""
        ...


class Recipe(Protocol):
    """The shape of a head: a frozen dataclass of plain values.

    Attributes:
        kind: name of the drafter that asks it.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: ClassVar[str]

    def task(self, frozen: Frozen, width: int) -> Task:
        """A fresh head to train, for hidden states of that width; random weights are torch's."""
        ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        steps: batches in all.
        batch_size: windows of each.
        learning_rate: of AdamW at its highest, after a linear rise; it falls along a cosine to zero.
        warmup_steps: of the rise.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        soft: learn the model's own distribution, as far as the data has it, in place of the token it drew.
        seed: of first weights and of the order of windows.
    """

    steps: int = 2000
    batch_size: int = 256
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip: float = 0.5
    soft: bool = False
    seed: int = 0

    def lr_at(self, step: int) -> float:
        """Learning rate of a step counted from 0."""
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * rise * 0.5 * (1.0 + math.cos(math.pi * step / self.steps))


def loss_of(task: Task, batch: Batch, soft: bool) -> torch.Tensor:
    """Cross-entropy in nats, its mean at each depth weighted and summed.

    With `soft`, against the model's most probable tokens, their probabilities renormalised.
    """
    logits = task.predict(batch)
    if soft:
        targets = batch.top_logprobs.softmax(-1)
        losses = -(targets * logits.log_softmax(-1).gather(-1, batch.top_ids)).sum(-1)
    else:
        losses = F.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
        losses = losses.view(batch.known.shape)
    means = (losses * batch.known).sum(0) / batch.known.sum(0).clamp(min=1)
    return (means * torch.tensor(task.weights)).sum()


def fit(
    task: Task,
    windows: Windows,
    schedule: Schedule,
    checkpoint: Path | None = None,
    save_every: int = 200,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train a head in place; an interrupted run goes on where its checkpoint stands and ends the same bit for bit.

    Args:
        task: whose head learns.
        windows: to learn from.
        schedule: see there.
        checkpoint: file for the state; None: none is kept.
        save_every: steps between checkpoints; there is one at the end in any case.
        on_step: told the number of finished steps and the last one's loss.

    Returns:
        Mean loss of the steps between checkpoints.
    """
    parameters = list(task.head.parameters())
    optimiser = torch.optim.AdamW(parameters, weight_decay=schedule.weight_decay, betas=(0.9, 0.95))
    progress = Progress()
    if checkpoint is not None and checkpoint.exists():
        stored = Checkpoint.load(checkpoint)
        task.head.load_state_dict(stored.model)
        optimiser.load_state_dict(stored.optimiser[0])
        progress = stored.progress
    order = _Order(len(windows), schedule.batch_size, schedule.seed)
    recent: list[float] = []
    while progress.step < schedule.steps:
        for group in optimiser.param_groups:
            group["lr"] = schedule.lr_at(progress.step)
        loss = loss_of(task, windows.batch(order.batch(progress.step)), schedule.soft)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, schedule.clip)
        optimiser.step()
        recent.append(loss.item())
        progress.step += 1
        if progress.step % save_every == 0 or progress.step == schedule.steps:
            progress.history.append({"loss": sum(recent) / len(recent)})
            recent = []
            if checkpoint is not None:
                Checkpoint(task.head.state_dict(), [optimiser.state_dict()], progress).save(checkpoint)
        on_step(progress.step, loss.item())
    return [each["loss"] for each in progress.history]


class _Order:
    """Which windows a step sees; it follows from the step alone, so that a resumed run needs no generator's state."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self._count, self._size, self._seed = count, min(batch_size, count), seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> torch.Tensor:
        epoch, place = divmod(step, self._count // self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._count, generator=generator)
        return self._order[place * self._size : (place + 1) * self._size]


@torch.no_grad()
def rank_accuracies(task: Task, windows: Windows, batch_size: int = 256) -> list[list[float]]:
    """How often the token at each depth is the head's guess of each rank, up to `RANKS`: [n][ranks].

    A head that sees earlier tokens is shown the true ones.
    """
    hits, known = [], []
    for start in range(0, len(windows), batch_size):
        batch = windows.batch(torch.arange(start, min(start + batch_size, len(windows))))
        logits = task.predict(batch)
        guesses = logits.topk(min(RANKS, logits.shape[-1]), dim=-1).indices
        right = (guesses == batch.tokens[:, 1:, None]) & batch.known[:, :, None]
        hits.append(right.sum(0))
        known.append(batch.known.sum(0))
    counts = torch.stack(known).sum(0).clamp(min=1)
    accuracies: list[list[float]] = (torch.stack(hits).sum(0) / counts[:, None]).tolist()
    return accuracies
