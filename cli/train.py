"""`turnout train`: heads for drafters and length policies, from the answers of models that stay as they are.

A module `cli.train_*` adds commands of its own.
"""

from __future__ import annotations

import asyncio
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import cli
from cli.artifact_output import keep
from cli.output import print_json, print_table, shown_progress
from cli.train_options import (
    AsJson,
    BatchSize,
    Config,
    LearningRate,
    MaxTokens,
    ModelName,
    Out,
    Seed,
    Steps,
    Temperature,
    check_artifact,
    configured_model,
)

if TYPE_CHECKING:
    from training.head_runs import Plan, Trained
    from training.heads import Recipe
    from turnout.config import ModelConfig, TurnoutConfig


app = typer.Typer(
    help="Train drafters, length policies and routers on models' own answers; the models stay as they are.",
    no_args_is_help=True,
)
for found in pkgutil.iter_modules(cli.__path__):
    if found.name.startswith("train_") and found.name != "train_options":
        import_module(f"cli.{found.name}").register(app)

Prompts = Annotated[
    Path | None, typer.Option(help="Text file, a question a line, every eighth held out; absent: the demo's problems.")
]
Count = Annotated[int, typer.Option(min=8, help="Questions used.")]
Soft = Annotated[bool, typer.Option("--soft", help="Learn the model's probabilities instead of the tokens it drew.")]
Blocks = Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")]
OwnMatrices = Annotated[
    bool, typer.Option("--own-matrices", help="An output matrix of each head's own, as in the paper; else the model's.")
]
ExitLayer = Annotated[int | None, typer.Option(min=1, help="Layers before the exit; absent: a quarter of the model's.")]
Answers = Annotated[int, typer.Option(min=1, help="Answers that a step learns from.")]
Hard = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Weight of the token the model drew, relative to its probabilities.")
]


@app.command()
def medusa(
    out: Out,
    model: ModelName = "large",
    config: Config = None,
    prompts: Prompts = None,
    count: Count = 2500,
    max_tokens: MaxTokens = 160,
    temperature: Temperature = 0.7,
    steps: Steps = 4000,
    batch_size: BatchSize = 256,
    learning_rate: LearningRate = 3e-3,
    soft: Soft = False,
    seed: Seed = 0,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Heads: how many tokens ahead.")] = 4,
    blocks: Blocks = 3,
    own_matrices: OwnMatrices = False,
    as_json: AsJson = False,
) -> None:
    """Train heads for the drafter medusa: each guesses one place ahead from the last hidden state."""
    from training.medusa import MedusaRecipe

    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    recipe = MedusaRecipe(soft, heads=heads, blocks=blocks, own_matrices=own_matrices)
    _run(recipe, configured_model(model, config), out, asked, schedule, as_json)


@app.command()
def redrafter(
    out: Out,
    model: ModelName = "large",
    config: Config = None,
    prompts: Prompts = None,
    count: Count = 2500,
    max_tokens: MaxTokens = 160,
    temperature: Temperature = 0.7,
    steps: Steps = 4000,
    batch_size: BatchSize = 128,
    learning_rate: LearningRate = 3e-3,
    soft: Soft = False,
    seed: Seed = 0,
    ahead: Annotated[int, typer.Option(min=1, max=16, help="Tokens ahead that it learns to go.")] = 5,
    blocks: Blocks = 3,
    as_json: AsJson = False,
) -> None:
    """Train the head of the drafter redrafter: a recurrent cell over drafted tokens and the last hidden state."""
    from training.redrafter import ReDrafterRecipe

    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    _run(
        ReDrafterRecipe(soft, ahead=ahead, blocks=blocks),
        configured_model(model, config),
        out,
        asked,
        schedule,
        as_json,
    )


@app.command()
def kangaroo(
    out: Out,
    model: ModelName = "large",
    config: Config = None,
    prompts: Prompts = None,
    count: Count = 2500,
    max_tokens: MaxTokens = 160,
    temperature: Temperature = 0.7,
    steps: Steps = 2000,
    batch_size: Answers = 32,
    learning_rate: LearningRate = 3e-3,
    seed: Seed = 0,
    exit_layer: ExitLayer = None,
    hard: Hard = 0.0,
    as_json: AsJson = False,
) -> None:
    """Train the adapter of the drafter kangaroo: an attention layer behind an early exit of the model."""
    from training.exits import KangarooRecipe

    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    _run(KangarooRecipe(exit_layer, hard), configured_model(model, config), out, asked, schedule, as_json)


@app.command()
def eesd(
    out: Out,
    model: ModelName = "large",
    config: Config = None,
    prompts: Prompts = None,
    count: Count = 2500,
    max_tokens: MaxTokens = 160,
    temperature: Temperature = 0.7,
    steps: Steps = 2000,
    batch_size: Answers = 32,
    learning_rate: LearningRate = 3e-3,
    seed: Seed = 0,
    exit_layer: ExitLayer = None,
    hard: Hard = 0.1,
    as_json: AsJson = False,
) -> None:
    """Train the exit layer of the drafter eesd: a decoder layer behind an early exit of the model."""
    from training.exits import EesdRecipe

    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    _run(EesdRecipe(exit_layer, hard), configured_model(model, config), out, asked, schedule, as_json)


def _run(
    recipe: Recipe,
    settings: tuple[ModelConfig, TurnoutConfig],
    out: Path,
    asked: tuple[Path | None, int, dict[str, Any]],
    schedule: dict[str, Any],
    as_json: bool,
) -> None:
    """Train, write the artifact and NAME.report.json, and show what was measured."""
    check_artifact(out)
    from training.fitting import Schedule
    from training.head_runs import Plan, Questions
    from turnout.types import SamplingParams

    file, count, sampling = asked
    questions = Questions.of_demo(count) if file is None else Questions.of_file(file, count)
    plan = Plan(recipe, Schedule(**schedule), questions, SamplingParams(**sampling))
    trained = asyncio.run(_train(settings, plan, out))
    report = keep(trained.artifact, trained.report, out)
    if as_json:
        print_json(report)
        return
    print_table([">depth", ">best guess right", ">among the best 5", ">reached and accepted"], _by_depth(report))
    typer.echo(
        f"{report['tokens_per_round']:.2f} tokens a round on held-out questions,"
        f" {report['nodes_per_round']:.0f} drafted; {out.name}: {out.stat().st_size / 2**20:.2f} MiB"
    )


def _by_depth(report: dict[str, Any]) -> list[list[object]]:
    """Rows of the table; heads that draft token by token have guesses of the first depth only."""
    ranks, accepted = report["rank_accuracies"], report["acceptance_by_depth"]
    rows: list[list[object]] = []
    for depth in range(max(len(ranks), len(accepted))):
        known = depth < len(ranks)
        guesses = [f"{ranks[depth][0]:.1%}", f"{sum(ranks[depth][:5]):.1%}"] if known else ["", ""]
        rows.append([depth + 1, *guesses, f"{accepted[depth] if depth < len(accepted) else 0.0:.1%}"])
    return rows


async def _train(settings: tuple[ModelConfig, TurnoutConfig], plan: Plan, out: Path) -> Trained:
    from training.head_runs import Target, train_head

    target = Target.load(settings[0], settings[1].engine)
    try:
        with shown_progress() as advance:
            return await train_head(target, plan, out.with_suffix(".run"), advance)
    finally:
        await target.close()
