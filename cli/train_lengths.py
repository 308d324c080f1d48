"""`turnout train disco` and `turnout train specdecpp`: heads of length policies, for a pool's pair of models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.artifact_output import keep
from cli.ask import read_config
from cli.output import print_json, shown_progress
from cli.train_options import (
    AsJson,
    Config,
    Epochs,
    MaxTokens,
    Out,
    Pool,
    Seed,
    Temperature,
    check_artifact,
)
from turnout.errors import not_found

if TYPE_CHECKING:
    from training.length_predictors import Disco, SpecDecPlusPlus, Trained
    from turnout.config import TurnoutConfig

Asked = tuple[Path | None, int, dict[str, Any]]  # a file of questions, how many, how they are answered

Prompts = Annotated[Path | None, typer.Option(help="Text file, a question a line; absent: the demo's problems.")]
Count = Annotated[int, typer.Option(min=8, help="Questions used.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `turnout train`."""
    app.command("disco")(disco)
    app.command("specdecpp")(specdecpp)


def disco(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 256,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 1.0,
    epochs: Epochs = 20,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the classifier of the length policy disco: whether to draft on after a token."""
    from training.length_predictors import STEADY, Disco

    recipe = Disco(epochs=epochs, schedule=replace(STEADY, seed=seed))
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    _run(recipe, (config, pool), out, asked, as_json)


def specdecpp(
    out: Out,
    config: Config = None,
    pool: Pool = None,
    prompts: Prompts = None,
    count: Count = 256,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 1.0,
    epochs: Epochs = 3,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the acceptance head of the length policy specdecpp: the chance that a drafted token is accepted."""
    from training.length_predictors import SpecDecPlusPlus

    recipe = SpecDecPlusPlus(epochs=epochs)
    recipe = replace(recipe, schedule=replace(recipe.schedule, seed=seed))
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    _run(recipe, (config, pool), out, asked, as_json)


def _run(
    recipe: Disco | SpecDecPlusPlus, chosen: tuple[Path | None, str | None], out: Path, asked: Asked, as_json: bool
) -> None:
    """Train, write the artifact and NAME.report.json, and say how good the head is."""
    check_artifact(out)
    settings = read_config(chosen[0])
    name = chosen[1] or next(iter(settings.pools))
    if name not in settings.pools:
        raise not_found("pool", name, list(settings.pools))
    trained = asyncio.run(_train(recipe, name, settings, out, asked))
    report = keep(trained.artifact, trained.report, out)
    if as_json:
        print_json(report)
        return
    heldout = trained.heldout
    typer.echo(
        f"on held-out questions: area under the ROC curve {heldout.auc:.3f}, cross-entropy {heldout.loss:.3f} nats"
        f" ({heldout.constant_loss:.3f} for a constant); {out.name}: {out.stat().st_size / 2**10:.0f} KiB"
    )


async def _train(
    recipe: Disco | SpecDecPlusPlus, name: str, settings: TurnoutConfig, out: Path, asked: Asked
) -> Trained:
    from pool.local_pool import LocalPool
    from training.demo_prompts import read_lines, training_prompts
    from training.length_data import Source
    from training.length_predictors import train_pair
    from turnout.types import SamplingParams

    pool = LocalPool.load(name, settings)
    try:
        file, count, sampling = asked
        asked_of = training_prompts(count, "length-predictors") if file is None else read_lines(file, count)
        prompts = [prompt.encode(pool.tokenizer) for prompt in asked_of]
        source = Source(prompts, SamplingParams(**sampling), frozenset(pool.tokenizer.eos_ids), recipe.schedule.seed)
        with shown_progress() as advance:
            return await train_pair(pool.model_pool, source, recipe, out.with_suffix(".run"), advance)
    finally:
        await pool.close()
