"""How heads behind an early exit learn: the whole model's distribution at every token of its own answers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from decoding.exit_heads import ExitHead
from training.distil import Answers
from training.heads import RANKS, Frozen
from turnout.errors import out_of_range


@dataclass(frozen=True)
class ExitRecipe:
    """What the recipes of exit heads share. A `training.heads.Recipe`.

    Attributes:
        layer: layers before the exit; None: a quarter of the model's.
        hard: weight of the token that the model drew in the loss, relative to its distribution's.
    """

    kind: ClassVar[str]
    layer: int | None = None
    hard: float = 0.0

    @property
    def soft_top(self) -> int:
        """See `Recipe.soft_top`; the whole distribution is had from the last states."""
        return 0

    def exit_layer(self, num_layers: int) -> int:
        """See `Recipe.exit_layer`.

        Raises:
            TurnoutError: INVALID_ARGUMENT: the model has no such layer to leave at.
        """
        layer = max(1, num_layers // 4) if self.layer is None else self.layer
        if not 1 <= layer < num_layers:
            raise out_of_range("exit_layer", f"{layer}; allowed: 1 to {num_layers - 1}")
        return layer

    @abstractmethod
    def inner(self, config: Any) -> int:
        """Width of the head's MLP; 0: none."""

    def task(self, frozen: Frozen, width: int) -> ExitTask:
        """See `Recipe.task`."""
        return ExitTask(self, frozen, width)


@dataclass(frozen=True)
class KangarooRecipe(ExitRecipe):
    """The adapter: attention and norms, no MLP (paper #157, Kangaroo)."""

    kind: ClassVar[str] = "kangaroo"

    def inner(self, config: Any) -> int:
        """See `ExitRecipe.inner`."""
        return 0


@dataclass(frozen=True)
class EesdRecipe(ExitRecipe):
    """The exit layer: one decoder layer as wide as the model's own (paper #33, EESD)."""

    kind: ClassVar[str] = "eesd"
    hard: float = 0.1

    def inner(self, config: Any) -> int:
        """See `ExitRecipe.inner`."""
        return int(config.intermediate_size)


@dataclass(frozen=True)
class Traces:
    """Answers side by side, with their prompts; what lies behind an answer's end is padding.

    Attributes:
        states: float32 [b, n, width], behind the exit, at every place from the prompt's first token.
        taught: bool [b, n], whether the place chose a token of the answer.
        last: float32 [t, width], the model's last states at the taught places, row by row.
        tokens: int64 [t], the tokens chosen there.
    """

    states: torch.Tensor
    taught: torch.Tensor
    last: torch.Tensor
    tokens: torch.Tensor


class ExitTask:
    """An exit head in training. Implements `training.heads.Task`.

    Its last norm begins as the model's own, so that it begins as the model's head on the exit's states.

    Args:
        recipe: where it stands and what it is.
        frozen: the model; its output matrix is used as it is.
        width: of its hidden states.
    """

    def __init__(self, recipe: ExitRecipe, frozen: Frozen, width: int) -> None:
        config = frozen.config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or width // heads
        self.head = ExitHead(
            width, heads, getattr(config, "num_key_value_heads", None) or heads, head_dim, recipe.inner(config)
        )
        if frozen.norm is not None:
            self.head.norm.weight.data.copy_(frozen.norm)
        self.frozen, self.hard = frozen, recipe.hard
        self._layer = recipe.exit_layer(config.num_hidden_layers)

    def lessons(self, answers: Answers) -> ExitLessons:
        """See `Task.lessons`."""
        return ExitLessons(self, answers)

    def settings(self) -> dict[str, Any]:
        """See `Task.settings`."""
        return {"exit_layer": self._layer}

    def predict(self, traces: Traces) -> torch.Tensor:
        """Logits at the taught places: [t, vocab]."""
        return self.frozen.logits(self.head(traces.states)[traces.taught])


class ExitLessons:
    """Whole answers to learn from. Implements `training.heads.Lessons`.

    Args:
        task: whose.
        answers: made with the states behind the exit.
    """

    def __init__(self, task: ExitTask, answers: Answers) -> None:
        self._task, self._answers = task, answers
        self._first_token = answers.lengths.cumsum(0) - answers.lengths
        self._first_place = answers.places.cumsum(0) - answers.places

    def __len__(self) -> int:
        return len(self._answers.lengths)

    def batch(self, picked: torch.Tensor) -> Traces:
        """Answers by index, int64 [b]."""
        answers = self._answers
        states, taught, rows = [], [], []
        for index in picked.tolist():
            count, length = int(answers.places[index]), int(answers.lengths[index])
            first, token = int(self._first_place[index]), int(self._first_token[index])
            states.append(answers.exits[first : first + count].float())
            taught.append(torch.arange(count) >= count - length)
            rows.append(torch.arange(token, token + length))
        picked_rows = torch.cat(rows)
        return Traces(
            states=nn.utils.rnn.pad_sequence(states, batch_first=True),
            taught=nn.utils.rnn.pad_sequence(taught, batch_first=True),
            last=answers.states[picked_rows].float(),
            tokens=answers.tokens[picked_rows],
        )

    def loss(self, picked: torch.Tensor) -> torch.Tensor:
        """See `Lessons.loss`; cross-entropy to the model's softmax, mixed with that of the tokens it drew."""
        task, traces = self._task, self.batch(picked)
        said = task.predict(traces).log_softmax(-1)
        with torch.no_grad():
            targets = task.frozen.logits(traces.last).softmax(-1)
        soft = -(targets * said).sum(-1).mean()
        return (1.0 - task.hard) * soft + task.hard * F.nll_loss(said, traces.tokens)

    @torch.no_grad()
    def accuracies(self) -> list[list[float]]:
        """See `Lessons.accuracies`: of the one token ahead."""
        hits, count = torch.zeros(RANKS), 0
        for start in range(0, len(self), 32):
            traces = self.batch(torch.arange(start, min(start + 32, len(self))))
            logits = self._task.predict(traces)
            guesses = logits.topk(min(RANKS, logits.shape[-1]), dim=-1).indices
            right = (guesses == traces.tokens[:, None]).sum(0)
            hits[: len(right)] += right
            count += len(traces.tokens)
        return [(hits / count).tolist()]
