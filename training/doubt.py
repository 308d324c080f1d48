"""Training of heads that read doubt from a prompt's hidden states, with semantic entropies of samples as labels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decoding.aggregators.base import AnswerSet
from decoding.artifacts import Artifact
from decoding.doubt_heads import BottleneckHead, answer_state, prompt_state
from decoding.model import Model, ModelPool
from decoding.step_heads import StateHead
from decoding.uncertainty.semantic_entropy import SemanticEntropy
from training.calibration import auc
from training.continuations import Advance, Made
from training.fitting import Schedule, fit
from training.length_data import Source
from turnout.errors import invalid

AT_ONCE = 8
PROBE = Schedule(batch_size=64, learning_rate=1e-2, warmup_steps=0, clip=None, weight_decay=0.1)
Position = Literal["prompt", "answer"]
POSITIONS: tuple[Position, ...] = ("prompt", "answer")


@dataclass(frozen=True)
class Doubts:
    """What was read of each prompt.

    Attributes:
        states: by position, float32 [n, layers, hidden].
        entropies: [n] semantic entropy of the samples, nats.
    """

    states: dict[Position, torch.Tensor]
    entropies: list[float]

    def __len__(self) -> int:
        return len(self.entropies)


def best_split(values: Items[float]) -> float:
    """Return the threshold g that splits values into those below and those from g on with the least squared error.

    Raises:
        ValueError: all values are the same.
    """
    order = sorted(values)
    ends = [place for place in range(1, len(order)) if order[place] > order[place - 1]]
    if not ends:
        raise ValueError("all values are the same")
    sums, squares = np.cumsum(order), np.cumsum(np.square(order))

    def error(place: int) -> float:
        left = squares[place - 1] - sums[place - 1] ** 2 / place
        total, rest = sums[-1] - sums[place - 1], len(order) - place
        return float(left + squares[-1] - squares[place - 1] - total**2 / rest)

    return order[min(ends, key=error)]


async def mine_doubts(
    models: ModelPool, role: str, source: Source, estimator: SemanticEntropy, advance: Advance = lambda *_: None
) -> Doubts:
    """Measure the semantic entropy of every prompt, and read all layers at its end and in one answer.

    The answer is one of its own, drawn as `source` says; the samples are drawn as the estimator says.

    Args:
        models: frozen.
        role: who answers, and is read.
        source: the prompts.
        estimator: gives the labels; checked.
        advance: called with progress.
    """
    model = models.by_role(role)
    layers = list(range(model.num_layers))

    async def one(index: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        seq = source.sequence(index)
        draft = model.fork(seq)
        try:
            before = await prompt_state(model, seq, layers)
            await model.decode(draft)
            after = await answer_state(model, seq, tuple(draft.answer), layers)
            drawn = await estimator.samples(seq, model, models)
            entropy = await estimator.measure(AnswerSet(drawn, seq.seed, seq, model, models), None)
            return before, after, entropy
        finally:
            for each in (draft, seq):
                model.release(each)

    found: list[tuple[torch.Tensor, torch.Tensor, float]] = []
    for start in range(0, len(source.prompts), AT_ONCE):
        group = range(start, min(start + AT_ONCE, len(source.prompts)))
        found += await asyncio.gather(*map(one, group))
        advance("sampling", len(found), len(source.prompts))
    shape = (len(found), len(layers), -1)
    states: dict[Position, torch.Tensor] = {
        "prompt": torch.stack([before for before, _, _ in found]).reshape(shape),
        "answer": torch.stack([after for _, after, _ in found]).reshape(shape),
    }
    return Doubts(states, [entropy for _, _, entropy in found])


def train_probe(
    doubts: Doubts,
    model: Model,
    role: str,
    position: Position | None = None,
    adjacent: int = 1,
    epochs: int = 60,
    schedule: Schedule = PROBE,
    about: dict[str, Any] | None = None,
) -> Made:
    """Fit a semantic entropy probe (paper #50): one for each position and layer, the best of which is kept.

    Labels are semantic entropies, split where both groups are tightest. Half of the prompts train, a quarter chooses
    layer and position by the area under the ROC curve, and a quarter is measured.

    Args:
        doubts: of at least 16 prompts.
        model: that was read.
        role: its role.
        position: where it reads; None: whichever is better.
        adjacent: layers that are read together.
        epochs: passes over the prompts.
        schedule: of the steps, whose number follows.
        about: what else the artifact says.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too few prompts, or their entropies are all alike.
    """
    threshold, labels, (train, choose, report) = _labels(doubts)
    tried: dict[str, float] = {}
    best: tuple[float, StateHead, Position, list[int]] | None = None
    for place in POSITIONS if position is None else (position,):
        states = doubts.states[place]
        for first in range(states.shape[1] - adjacent + 1):
            layers = list(range(first, first + adjacent))
            inputs = states[:, layers].flatten(1)
            head = _logistic(inputs[train], labels[train], epochs, schedule)
            reached = _auc(head(inputs[choose]), labels[choose])
            tried[f"{place}/{first}"] = reached
            if best is None or reached > best[0]:
                best = reached, head, place, layers
    assert best is not None
    _, head, place, layers = best
    inputs = doubts.states[place][:, layers].flatten(1)
    heldout = {"auc": _auc(head(inputs[report]), labels[report]), "prompts": len(report)}
    made = {"threshold": threshold, "position": place, "layers": layers, "ablation": tried, "heldout": heldout}
    settings = {"head": head.settings, **made, **(about or {})}
    tensors = dict(head.state_dict())
    return Made(Artifact("semantic_entropy_probe", "training.doubt", settings, {role: model.digest}, tensors), made)


def train_bottleneck(
    doubts: Doubts,
    model: Model,
    role: str,
    layer: int = -1,
    codebooks: int = 64,
    keys: int = 64,
    key_size: int = 8,
    passes: int = 4,
    rate: float = 1.0,
    seed: int = 0,
    about: dict[str, Any] | None = None,
) -> Made:
    """Fit a discrete key-value bottleneck (paper #72): keys without labels, then values, one prompt after the other.

    Args:
        doubts: of at least 16 prompts; labels as in `train_probe`, three quarters of the prompts train.
        model: that was read.
        role: its role.
        layer: whose state at the prompt's end is read; negative: from the last.
        codebooks: how many.
        keys: of each.
        key_size: numbers of a key.
        passes: over the prompts.
        rate: of learning.
        seed: of the projections.
        about: what else the artifact says.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too few prompts, entropies all alike, or no such layer.
    """
    threshold, labels, (train, choose, report) = _labels(doubts)
    states = doubts.states["prompt"]
    if not -states.shape[1] <= layer < states.shape[1]:
        raise invalid("layer", f"must be from {-states.shape[1]} to {states.shape[1] - 1} (got {layer})")
    inputs, train = states[:, layer], torch.cat([train, choose])
    head = BottleneckHead(inputs.shape[1], 2, codebooks, keys, key_size, seed)
    head.place_keys(inputs[train])
    losses = []
    for _ in range(passes):
        steps = [head.learn(inputs[place : place + 1], labels[place : place + 1].long(), rate) for place in train]
        losses.append(sum(steps) / len(steps))
    head.requires_grad_(False).eval()
    scores = head(inputs[report]).log_softmax(-1)[:, 1]
    heldout = {"auc": _auc(scores, labels[report]), "prompts": len(report), "key_usage": head.usage(inputs[train])}
    made = {"threshold": threshold, "losses": losses, "heldout": heldout}
    settings = {"head": head.settings, "layers": [layer % states.shape[1]], **made, **(about or {})}
    tensors = dict(head.state_dict())
    return Made(Artifact("key_value_bottleneck", "training.doubt", settings, {role: model.digest}, tensors), made)


def _labels(doubts: Doubts) -> tuple[float, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The split, whether each prompt is above it, and which prompts train, choose and report."""
    count = len(doubts)
    if count < 16:
        raise invalid("prompts", f"are {count}; at least 16 are needed")
    try:
        threshold = best_split(doubts.entropies)
    except ValueError:
        raise invalid("prompts", "have semantic entropies that are all alike; both kinds are needed") from None
    labels = torch.tensor([float(value >= threshold) for value in doubts.entropies])
    places = torch.arange(count)
    parts = places[places % 4 < 2], places[places % 4 == 2], places[places % 4 == 3]
    for part in parts:
        if labels[part].min() == labels[part].max():
            raise invalid("prompts", "are too few of one kind: each part needs high and low semantic entropies")
    return threshold, labels, parts


def _logistic(inputs: torch.Tensor, labels: torch.Tensor, epochs: int, schedule: Schedule) -> StateHead:
    torch.manual_seed(schedule.seed)
    head = StateHead(inputs.shape[1])
    head.standardise(inputs)
    steps = epochs * max(1, len(inputs) // min(schedule.batch_size, len(inputs)))

    def loss(picked: torch.Tensor) -> torch.Tensor:
        return binary_cross_entropy_with_logits(head(inputs[picked]), labels[picked])

    fit(head, loss, len(inputs), replace(schedule, steps=steps))
    return head.requires_grad_(False).eval()


def _auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return auc(scores.double().numpy(), labels.double().numpy())
