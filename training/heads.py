"""What draft heads learn from a frozen model's answers: the ends of the model, windows over answers, the loss."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from decoding.length_heads import Head
from training.distil import Answers

RANKS = 10
SOFT_TOP = 10  # probabilities kept at each token where they are what is learned


@dataclass(frozen=True)
class Frozen:
    """The ends of the model that heads stand on; nothing of it is trained.

    Attributes:
        embed: token ids -> what goes into the first layer.
        output: states after the last norm -> logits before the cap.
        softcap: bound of the logits; None: none.
        config: the model's Hugging Face configuration; None where no head takes its shape from it.
        norm: weight of the last norm; None: none to begin with.
    """

    embed: nn.Module
    output: nn.Module
    softcap: float | None = None
    config: Any = None
    norm: torch.Tensor | None = None

    @classmethod
    def of(cls, model: Any) -> Frozen:
        """Those of a Hugging Face causal language model."""
        model.eval().requires_grad_(False)
        softcap = getattr(model.config, "final_logit_softcapping", None)
        norm = getattr(getattr(model, "model", None), "norm", None)
        weight = getattr(norm, "weight", None)
        return cls(model.get_input_embeddings(), model.get_output_embeddings(), softcap, model.config, weight)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., vocab]."""
        return self.capped(self.output(states))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits within the model's bound, where it has one."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Lessons(Protocol):
    """What a head learns from, made of answers."""

    def __len__(self) -> int:
        """Examples."""
        ...

    def loss(self, picked: torch.Tensor) -> torch.Tensor:
        """Of the examples with these indices, int64 [b]; in nats."""
        ...

    def accuracies(self) -> list[list[float]]:
        """How often the token at each depth is the head's guess of each rank, up to `RANKS`: [depths][ranks]."""
        ...


class Task(Protocol):
    """A head in training."""

    @property
    def head(self) -> Head:
        """The only thing with gradients."""
        ...

    def lessons(self, answers: Answers) -> Lessons:
        """What it learns from these answers."""
        ...

    def settings(self) -> dict[str, Any]:
        """What its drafter must know besides the head, in plain values."""
        ...


class Recipe(Protocol):
    """The shape of a head: a frozen dataclass of plain values.

    Attributes:
        kind: name of the drafter that asks it.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: ClassVar[str]

    @property
    def soft_top(self) -> int:
        """How many of the model's probabilities it learns from at each token."""
        ...

    def exit_layer(self, num_layers: int) -> int | None:
        """The layer that it reads, of a model of `num_layers`; None: the last."""
        ...

    def task(self, frozen: Frozen, width: int) -> Task:
        """A fresh head to train, for hidden states of that width; random weights are torch's."""
        ...


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


class WindowTask:
    """A head that guesses several tokens from one state. Implements `Task`.

    Attributes:
        weights: of the loss at each of n depths, the nearest token's first.
        soft: learn the model's own distribution, as far as the data has it, in place of the token it drew.
    """

    head: Head
    weights: tuple[float, ...]
    soft: bool = False

    @abstractmethod
    def predict(self, batch: Batch) -> torch.Tensor:
        """Logits of each of the n tokens: [b, n, vocab]; a head that sees earlier tokens is shown the true ones."""

    def lessons(self, answers: Answers) -> WindowLessons:
        """See `Task.lessons`."""
        return WindowLessons(self, Windows(answers, len(self.weights)))

    def settings(self) -> dict[str, Any]:
        """See `Task.settings`."""
        return {}


@dataclass(frozen=True)
class WindowRecipe:
    """What recipes of heads on the last state share; `soft` is as in `WindowTask`."""

    soft: bool = False

    @property
    def soft_top(self) -> int:
        """See `Recipe.soft_top`."""
        return SOFT_TOP if self.soft else 0

    def exit_layer(self, num_layers: int) -> int | None:
        """See `Recipe.exit_layer`."""
        return None


@dataclass(frozen=True)
class WindowLessons:
    """Windows with what is learned from them. Implements `Lessons`."""

    task: WindowTask
    windows: Windows

    def __len__(self) -> int:
        return len(self.windows)

    def loss(self, picked: torch.Tensor) -> torch.Tensor:
        """See `Lessons.loss`."""
        return loss_of(self.task, self.windows.batch(picked))

    def accuracies(self) -> list[list[float]]:
        """See `Lessons.accuracies`."""
        return rank_accuracies(self.task, self.windows)


def loss_of(task: WindowTask, batch: Batch) -> torch.Tensor:
    """Cross-entropy in nats, its mean at each depth weighted and summed.

    Of soft tasks, against the model's most probable tokens, their probabilities renormalised.
    """
    logits = task.predict(batch)
    if task.soft:
        targets = batch.top_logprobs.softmax(-1)
        losses = -(targets * logits.log_softmax(-1).gather(-1, batch.top_ids)).sum(-1)
    else:
        losses = F.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
        losses = losses.view(batch.known.shape)
    means = (losses * batch.known).sum(0) / batch.known.sum(0).clamp(min=1)
    return (means * torch.tensor(task.weights)).sum()


@torch.no_grad()
def rank_accuracies(task: WindowTask, windows: Windows, batch_size: int = 256) -> list[list[float]]:
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
