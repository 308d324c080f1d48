"""Training of heads that read a hidden state and say how likely something is right: rewards and judgements."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decoding.artifacts import Artifact
from decoding.model import ModelPool
from decoding.step_heads import StateHead
from training.calibration import calibration
from training.fitting import Schedule, fit
from training.length_data import Examples, Source
from training.length_predictors import Advance, Trained, claim, split
from turnout.errors import invalid

AT_ONCE = 8
STEADY = Schedule(learning_rate=3e-3, warmup_steps=0, falls=True, clip=None)

Mine = Callable[[int], Awaitable[Examples]]


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is trained.

    Attributes:
        kind: of the artifact.
        role: whose hidden states it reads.
        hidden: width of its hidden layer; 0: it is linear.
        balanced: whether both labels weigh the same in the loss, however rare one is.
        epochs: passes over the examples.
        schedule: of their steps, whose number follows.
        extra: what else the examples follow from, in plain values.
    """

    kind: str
    role: Literal["small", "large"]
    hidden: int = 0
    balanced: bool = False
    epochs: int = 30
    schedule: Schedule = STEADY
    extra: tuple[tuple[str, Any], ...] = ()


async def train_state_head(
    models: ModelPool,
    source: Source,
    recipe: HeadRecipe,
    mine: Mine,
    folder: Path | None = None,
    advance: Advance = lambda *_: None,
) -> Trained:
    """Mine examples of every prompt, fit the head, measure it on prompts it has not seen.

    Args:
        models: frozen.
        source: the prompts; three quarters train, an eighth is measured.
        recipe: the settings.
        mine: the examples of a prompt, none perhaps.
        folder: where an interrupted run finds what it had done; None: nowhere.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too few prompts, labels all alike, or `folder` holds another run.
    """
    claim(folder, _about(models, source, recipe))
    examples = await _mine_all(mine, len(source.prompts), folder, advance)
    train, choose, report = split(examples, source)
    for name, part in (("to train on", train), ("held out", Examples.joined([choose, report]))):
        if part.labels.min() == part.labels.max():
            kind = "right" if part.labels.min() > 0.5 else "wrong"
            raise invalid("prompts", f"give {len(part)} examples {name} that are all {kind}; both kinds are needed")
    head, losses = _fit(train, recipe, folder, advance)
    unseen = Examples.joined([choose, report])
    scores = head(unseen.inputs).sigmoid().detach().double().numpy()
    heldout = calibration(scores, unseen.labels.double().numpy(), float(np.mean(train.labels.numpy())))
    artifact = Artifact(
        kind=recipe.kind,
        trainer="training.state_heads",
        settings={
            "head": head.settings,
            "recipe": asdict(recipe),
            "data": source.digest,
            "heldout": asdict(heldout),
        },
        models={recipe.role: models.by_role(recipe.role).digest},
        tensors=dict(head.state_dict()),
    )
    return Trained(artifact, losses, heldout)


def _fit(train: Examples, recipe: HeadRecipe, folder: Path | None, advance: Advance) -> tuple[StateHead, list[float]]:
    torch.manual_seed(recipe.schedule.seed)
    head = StateHead(train.inputs.shape[1], recipe.hidden)
    head.standardise(train.inputs)
    right = float(train.labels.mean())
    weights = torch.where(train.labels > 0.5, 0.5 / right, 0.5 / (1.0 - right)) if recipe.balanced else None
    per_epoch = recipe.schedule.batches_in(len(train))
    schedule = replace(recipe.schedule, steps=recipe.epochs * per_epoch)

    def loss(picked: torch.Tensor) -> torch.Tensor:
        weight = None if weights is None else weights[picked]
        return binary_cross_entropy_with_logits(head(train.inputs[picked]), train.labels[picked], weight)

    def on_step(step: int, value: float) -> None:
        advance(f"fitting, loss {value:.4f}", step, schedule.steps)

    checkpoint = folder / "checkpoint.pt" if folder is not None else None
    losses = fit(head, loss, len(train), schedule, checkpoint, per_epoch, on_step)
    return head.requires_grad_(False).eval(), losses


async def _mine_all(mine: Mine, num_prompts: int, folder: Path | None, advance: Advance) -> Examples:
    """All prompts' examples, `AT_ONCE` prompts at a time; what `folder` has of an earlier run is not mined again."""
    stored = folder / "examples.npz" if folder is not None else None
    if stored is not None and stored.exists():
        return Examples.load(stored)
    parts: list[Examples] = []
    for start in range(0, num_prompts, AT_ONCE):
        group = range(start, min(start + AT_ONCE, num_prompts))
        parts += await asyncio.gather(*(mine(index) for index in group))
        advance("mining", len(parts), num_prompts)
    filled = [part for part in parts if len(part)]
    if not filled:
        raise invalid("prompts", f"give no examples at all ({num_prompts} were tried)")
    examples = Examples.joined(filled)
    if stored is not None:
        examples.save(stored)
    return examples


def _about(models: ModelPool, source: Source, recipe: HeadRecipe) -> dict[str, Any]:
    return {
        "recipe": asdict(recipe),
        "prompts": source.digest,
        "sampling": source.sampling.model_dump(mode="json"),
        "seed": source.seed,
        "models": {role: models.by_role(role).digest for role in ("small", "large")},
    }


def examples_of(states: list[torch.Tensor], labels: list[float], index: int) -> Examples:
    """One prompt's examples, in order; states [hidden] each."""
    count = len(states)
    return Examples(
        torch.stack([state.to("cpu", torch.float32) for state in states]) if states else torch.zeros(0, 0),
        torch.tensor(labels, dtype=torch.float32),
        torch.full((count,), index),
        torch.arange(count),
    )
