"""Training of the heads of length policies, from prompts to an artifact and a report."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoding.artifacts import Artifact
from decoding.length_heads import AcceptanceHead, ContinueHead, Head
from decoding.model import ModelPool
from training.calibration import Calibration, calibration
from training.fitting import Schedule, fit
from training.length_data import Examples, Source, mine_acceptance, mine_rounds
from training.length_tuning import Costs, Replay, Tuned, tune
from turnout.atomic_files import write_whole
from turnout.errors import invalid

Advance = Callable[[str, int, int], None]  # what is being done, how much of it, out of how much

AT_ONCE = 8
STEADY = Schedule(learning_rate=3e-3, warmup_steps=0, falls=False, clip=None)
SLOWER = replace(STEADY, learning_rate=1e-3)


@dataclass(frozen=True)
class Disco:
    """How a `disco` head is trained: passes over the examples, and the schedule of their steps."""

    depth: int = 20
    top: int = 10
    hidden: int = 16
    epochs: int = 20
    schedule: Schedule = STEADY


@dataclass(frozen=True)
class SpecDecPlusPlus:
    """How a `specdecpp` head is trained; `reject_weight` is that of the reject class in the loss."""

    blocks: int = 3
    shared: bool = False
    mixing: float = 0.15
    reject_weight: float = 6.0
    epochs: int = 3
    schedule: Schedule = SLOWER


@dataclass(frozen=True)
class Trained:
    """A head ready to be saved, and how good it is on prompts it has not seen."""

    artifact: Artifact
    losses: list[float]
    heldout: Calibration
    tuned: Tuned | None = None

    @property
    def report(self) -> dict[str, Any]:
        """Everything measured, as plain values."""
        tuned = asdict(self.tuned) if self.tuned is not None else None
        return {"losses": self.losses, "heldout": asdict(self.heldout), "tuned": tuned}


async def train_pair(
    models: ModelPool,
    source: Source,
    recipe: Disco | SpecDecPlusPlus,
    folder: Path | None = None,
    advance: Advance = lambda *_: None,
) -> Trained:
    """The head that a recipe is for; see `train_disco`."""
    if isinstance(recipe, Disco):
        return await train_disco(models, source, recipe, folder, advance)
    return await train_specdecpp(models, source, recipe, folder, advance)


async def train_disco(
    models: ModelPool, source: Source, recipe: Disco, folder: Path | None = None, advance: Advance = lambda *_: None
) -> Trained:
    """Mine real rounds, fit the classifier, tune its threshold for time (paper #73, DISCO).

    Args:
        models: frozen; small drafts, large verifies.
        source: prompts; three quarters train, the rest is split between tuning and the report.
        recipe: the settings.
        folder: where an interrupted run finds what it had done; None: nowhere.
        advance: called with progress.
    """

    def mine(index: int) -> Awaitable[Examples]:
        return mine_rounds(models, source, index, recipe.depth, recipe.top)

    claim(folder, _about("disco", models, source, recipe))
    examples = await _mine_all(mine, len(source.prompts), folder, advance)
    train, choose, report = split(examples, source)
    torch.manual_seed(recipe.schedule.seed)
    head = ContinueHead(recipe.top, recipe.hidden)
    head.mean.copy_(train.inputs.mean(0))
    head.spread.copy_(train.inputs.std(0).clamp_min(1e-3))
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    losses = _fit(head, train, loss, recipe, folder, advance)
    replays = [Replay.of(part, head(part.inputs).sigmoid().detach()) for part in (choose, report)]
    context = sum(map(len, source.prompts)) // len(source.prompts) + source.sampling.max_tokens // 2
    tuned = tune(replays[0], replays[1], Costs.of(models, recipe.depth, context))
    settings = {"threshold": tuned.threshold, "most": tuned.most}
    heldout = _measure(head(report.inputs).sigmoid(), report, train)
    return Trained(_artifact("disco", head, models, recipe, settings), losses, heldout, tuned)


async def train_specdecpp(
    models: ModelPool,
    source: Source,
    recipe: SpecDecPlusPlus,
    folder: Path | None = None,
    advance: Advance = lambda *_: None,
) -> Trained:
    """Mine hidden states at the draft's tokens, fit the acceptance head (paper #105, SpecDec++); see `train_disco`."""

    def mine(index: int) -> Awaitable[Examples]:
        return mine_acceptance(models, source, index, recipe.mixing)

    claim(folder, _about("specdecpp", models, source, recipe))
    examples = await _mine_all(mine, len(source.prompts), folder, advance)
    train, _, report = split(examples, source)
    torch.manual_seed(recipe.schedule.seed)
    head = AcceptanceHead(examples.inputs.shape[1], recipe.blocks, recipe.shared)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return weighted_loss(logits, labels, recipe.reject_weight)

    losses = _fit(head, train, loss, recipe, folder, advance)
    # The weighted loss makes the head expect rejection that much more often; measured is what it says without that.
    rejected, accepted = head(report.inputs).unbind(-1)
    heldout = _measure((accepted - rejected + math.log(recipe.reject_weight)).sigmoid(), report, train)
    return Trained(_artifact("specdecpp", head, models, recipe, {}), losses, heldout)


def weighted_loss(logits: torch.Tensor, labels: torch.Tensor, reject_weight: float) -> torch.Tensor:
    """Soft cross-entropy with a weight on the reject class, over the weighted label mass.

    Args:
        logits: [n, 2]: rejected, accepted.
        labels: [n] chance of acceptance.
        reject_weight: of the reject class; that of the other is 1.
    """
    weights = torch.stack([reject_weight * (1.0 - labels), labels], 1)
    return -(weights * logits.log_softmax(-1)).sum() / weights.sum()


def split(examples: Examples, source: Source) -> tuple[Examples, Examples, Examples]:
    """Examples for training, tuning and the report, by prompt: six, one and one of every eight.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too few prompts for that.
    """
    prompts = range(len(source.prompts))
    parts = [{i for i in prompts if i % 8 < 6}, {i for i in prompts if i % 8 == 6}, {i for i in prompts if i % 8 == 7}]
    train, choose, report = (examples.of(part) for part in parts)
    if not (len(train) and len(choose) and len(report)):
        raise invalid("prompts", f"are too few to train on ({len(prompts)}); at least 8 are needed")
    return train, choose, report


def claim(folder: Path | None, about: dict[str, Any]) -> None:
    """Make a folder the place of one run, or find that it is.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it holds a run with other models, prompts or settings.
    """
    if folder is None:
        return
    path, text = folder / "settings.json", json.dumps(about, sort_keys=True)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    elif path.read_text(encoding="utf-8") != text:
        raise invalid("out", f"{folder.name!r} holds a run with other settings; remove it or choose another name")


def _about(kind: str, models: ModelPool, source: Source, recipe: Disco | SpecDecPlusPlus) -> dict[str, Any]:
    prompts = hashlib.blake2b(json.dumps(source.prompts).encode(), digest_size=16).hexdigest()
    sampling = source.sampling.model_dump(mode="json")
    run = {"kind": kind, "recipe": asdict(recipe), "prompts": prompts, "sampling": sampling, "seed": source.seed}
    return {**run, "models": _digests(models)}


def _digests(models: ModelPool) -> dict[str, str]:
    return {role: models.by_role(role).digest for role in ("small", "large")}


async def _mine_all(
    mine: Callable[[int], Awaitable[Examples]], num_prompts: int, folder: Path | None, advance: Advance
) -> Examples:
    """All prompts' examples, `AT_ONCE` prompts at a time; what `folder` has of an earlier run is not mined again."""
    shards: list[Examples] = []
    for start in range(0, num_prompts, AT_ONCE):
        group = range(start, min(start + AT_ONCE, num_prompts))
        # The folder is one run's, see `claim`: a shard's place says all that its content follows from.
        path = folder / "examples" / f"{start:08d}.npz" if folder is not None else None
        if path is not None and path.exists():
            shard = Examples.load(path)
        else:
            shard = Examples.joined(await asyncio.gather(*(mine(index) for index in group)))
            if path is not None:
                shard.save(path)
        shards.append(shard)
        advance("mining", group.stop, num_prompts)
    return Examples.joined(shards)


def _fit(
    head: Head,
    train: Examples,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    recipe: Disco | SpecDecPlusPlus,
    folder: Path | None,
    advance: Advance,
) -> list[float]:
    """Mean loss of each pass."""
    checkpoint = folder / "checkpoint.pt" if folder is not None else None
    per_epoch = recipe.schedule.batches_in(len(train))
    schedule = replace(recipe.schedule, steps=recipe.epochs * per_epoch)

    def loss_of(picked: torch.Tensor) -> torch.Tensor:
        return loss(head(train.inputs[picked]), train.labels[picked])

    def on_step(step: int, value: float) -> None:
        advance(f"fitting, loss {value:.4f}", step, schedule.steps)

    return fit(head, loss_of, len(train), schedule, checkpoint, per_epoch, on_step)


def _measure(scores: torch.Tensor, report: Examples, train: Examples) -> Calibration:
    values = scores.detach().double().numpy()
    return calibration(values, report.labels.double().numpy(), float(np.mean(train.labels.numpy())))


def _artifact(
    kind: str, head: Head, models: ModelPool, recipe: Disco | SpecDecPlusPlus, settings: dict[str, Any]
) -> Artifact:
    return Artifact(
        kind=kind,
        trainer="training.length_predictors",
        settings={"head": head.settings, "recipe": asdict(recipe), **settings},
        models=_digests(models),
        tensors=dict(head.state_dict()),
    )
