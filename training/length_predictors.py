"""Train the heads of length policies: `python -m training.length_predictors disco --config C --out DIR/disco`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress as ProgressBar

from decoding.artifacts import SUFFIX, Artifact
from decoding.length_heads import AcceptanceHead, ContinueHead, Head
from decoding.model import ModelPool
from engine.pool import LocalPool
from training.calibration import Calibration, calibration
from training.data import arithmetic
from training.fitting import Schedule, fit
from training.length_data import Examples, Source, mine_acceptance, mine_rounds
from training.length_tuning import Costs, Replay, Tuned, tune
from turnout.calls import ChatMessage
from turnout.config import TurnoutConfig, load_config
from turnout.errors import invalid
from turnout.types import SamplingParams

Advance = Callable[[str, int, int], None]  # what is being done, how much of it, out of how much

AT_ONCE = 8


@dataclass(frozen=True)
class Disco:
    """How a `disco` head is trained."""

    depth: int = 20
    top: int = 10
    hidden: int = 16
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class SpecDecPlusPlus:
    """How a `specdecpp` head is trained; `reject_weight` is that of the reject class in the loss."""

    blocks: int = 3
    shared: bool = False
    mixing: float = 0.15
    reject_weight: float = 6.0
    schedule: Schedule = field(default_factory=lambda: Schedule(epochs=3, learning_rate=1e-3))


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


async def train_disco(
    models: ModelPool, source: Source, recipe: Disco, folder: Path | None = None, advance: Advance = lambda *_: None
) -> Trained:
    """Mine real rounds, fit the classifier, tune its threshold for time (seed 73, DISCO).

    Args:
        models: frozen; small drafts, large verifies.
        source: prompts; three quarters train, the rest is split between tuning and the report.
        recipe: the settings.
        folder: where an interrupted run finds what it had done; None: nowhere.
        advance: told of progress.
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
    losses = _fit(head, train, loss, recipe.schedule, folder, advance)
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
    """Mine hidden states at the draft's tokens, fit the acceptance head (seed 105, SpecDec++); see `train_disco`."""

    def mine(index: int) -> Awaitable[Examples]:
        return mine_acceptance(models, source, index, recipe.mixing)

    claim(folder, _about("specdecpp", models, source, recipe))
    examples = await _mine_all(mine, len(source.prompts), folder, advance)
    train, _, report = split(examples, source)
    torch.manual_seed(recipe.schedule.seed)
    head = AcceptanceHead(examples.inputs.shape[1], recipe.blocks, recipe.shared)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return weighted_loss(logits, labels, recipe.reject_weight)

    losses = _fit(head, train, loss, recipe.schedule, folder, advance)
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
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        raise invalid("out", f"{folder.name!r} holds a run with other settings; remove it or choose another name")


def _about(kind: str, models: ModelPool, source: Source, recipe: Disco | SpecDecPlusPlus) -> dict[str, Any]:
    prompts = hashlib.blake2b(json.dumps(source.prompts).encode(), digest_size=16).hexdigest()
    sampling = source.sampling.model_dump(mode="json")
    run = {"kind": kind, "recipe": asdict(recipe), "prompts": prompts, "sampling": sampling, "seed": source.seed}
    return {**run, "models": _digests(models)}


def _digests(models: ModelPool) -> dict[str, str]:
    return {role: models.role(role).digest for role in ("small", "large")}


async def _mine_all(
    mine: Callable[[int], Awaitable[Examples]], num_prompts: int, folder: Path | None, advance: Advance
) -> Examples:
    """All prompts' examples, `AT_ONCE` prompts at a time; what `folder` has of an earlier run is not mined again."""
    stored = folder / "examples.npz" if folder is not None else None
    if stored is not None and stored.exists():
        return Examples.load(stored)
    parts: list[Examples] = []
    for start in range(0, num_prompts, AT_ONCE):
        group = range(start, min(start + AT_ONCE, num_prompts))
        parts += await asyncio.gather(*(mine(index) for index in group))
        advance("mining", len(parts), num_prompts)
    examples = Examples.joined(parts)
    if stored is not None:
        examples.save(stored)
    return examples


def _fit(
    head: Head,
    train: Examples,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    schedule: Schedule,
    folder: Path | None,
    advance: Advance,
) -> list[float]:
    checkpoint = folder / "checkpoint.pt" if folder is not None else None

    def on_epoch(epoch: int, value: float) -> None:
        advance(f"fitting, loss {value:.4f}", epoch, schedule.epochs)

    return fit(head, train.inputs, train.labels, loss, schedule, checkpoint, on_epoch)


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


def prompts_of(pool: LocalPool, file: Path | None, count: int) -> list[list[int]]:
    """Prompts as chats: the lines of a text file, or the demo's arithmetic problems."""
    if file is not None:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
    else:
        grades = (2, 3, 4)
        drawn = [arithmetic.heldout(grade, -(-count // len(grades)), seed=7) for grade in grades]
        lines = [problem.prompt for problems in zip(*drawn, strict=True) for problem in problems][:count]
    return [pool.tokenizer.encode_chat([ChatMessage("user", line)]) for line in lines]


Config = Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo pair.")]
Pool = Annotated[str | None, typer.Option(help="Which pool of it; absent: the first.")]
Out = Annotated[Path, typer.Option(help="Artifact to write, in the pool's folder of artifacts.")]
Prompts = Annotated[Path | None, typer.Option(help="Text file, a prompt a line; absent: arithmetic problems.")]
Count = Annotated[int, typer.Option(min=8, help="Prompts used.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the examples; absent: the recipe's.")]
Seed = Annotated[int, typer.Option(min=0, help="Of answers, weights and order.")]

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


@app.command()
def disco(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 256,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 1.0,
    epochs: Epochs = None,
    seed: Seed = 0,
) -> None:
    """The classifier of `disco`: whether to draft on after a token."""
    recipe = Disco()
    recipe = replace(recipe, schedule=_schedule(recipe.schedule, epochs, seed))
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    asyncio.run(_command(train_disco, recipe, out, config, pool, (prompts, count, sampling)))


@app.command()
def specdecpp(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 256,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 1.0,
    epochs: Epochs = None,
    seed: Seed = 0,
) -> None:
    """The acceptance head of `specdecpp`: the chance that a drafted token is accepted."""
    recipe = SpecDecPlusPlus()
    recipe = replace(recipe, schedule=_schedule(recipe.schedule, epochs, seed))
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    asyncio.run(_command(train_specdecpp, recipe, out, config, pool, (prompts, count, sampling)))


def _schedule(schedule: Schedule, epochs: int | None, seed: int) -> Schedule:
    return replace(schedule, epochs=epochs or schedule.epochs, seed=seed)


async def _command(
    train: Callable[..., Awaitable[Trained]],
    recipe: Disco | SpecDecPlusPlus,
    out: Path,
    config: Path | None,
    pool_name: str | None,
    asked: tuple[Path | None, int, SamplingParams],
) -> None:
    """Load the models, train, write NAME.safetensors and NAME.report.json; NAME.run/ lets an interrupted run go on."""
    settings = load_config(config) if config is not None else TurnoutConfig.demo()
    pool = LocalPool.load(pool_name or next(iter(settings.pools)), settings)
    try:
        file, count, sampling = asked
        eos_ids = frozenset(pool.tokenizer.eos_ids)
        source = Source(prompts_of(pool, file, count), sampling, eos_ids, recipe.schedule.seed)
        with ProgressBar() as bar:
            tasks: dict[str, Any] = {}

            def advance(what: str, done: int, total: int) -> None:
                stage = what.partition(",")[0]
                task = tasks.setdefault(stage, None)
                if task is None:
                    task = tasks[stage] = bar.add_task(what, total=total)
                bar.update(task, description=what, completed=done)

            trained = await train(pool.pool, source, recipe, out.with_suffix(".run"), advance)
    finally:
        await pool.close()
    trained.artifact.save(out.with_suffix(SUFFIX))
    text = json.dumps(trained.report, indent=2)
    out.with_suffix(".report.json").write_text(text + "\n", encoding="utf-8")
    typer.echo(text)


if __name__ == "__main__":
    app()
