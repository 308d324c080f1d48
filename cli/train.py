"""`turnout train`: draft heads for a model that stays as it is, from the model's own answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.asking import read_config
from cli.output import console, print_json, print_table
from turnout.errors import invalid, not_found

if TYPE_CHECKING:
    from training.head_runs import Plan
    from training.heads import Recipe
    from turnout.config import ModelConfig, TurnoutConfig

SUFFIX = ".safetensors"

app = typer.Typer(
    help="Train draft heads on a model's own answers; the model itself stays as it is.", no_args_is_help=True
)

Out = Annotated[
    Path,
    typer.Option(
        help="File to write, NAME.safetensors, in a pool's folder of artifacts. A run goes on from NAME.run/."
    ),
]
ModelName = Annotated[
    str, typer.Option(help="Which model: small or large of the first pool, a configured model's name, or a folder.")
]
Config = Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo models.")]
Prompts = Annotated[
    Path | None, typer.Option(help="Text file, a question a line, every eighth held out; absent: the demo's problems.")
]
Count = Annotated[int, typer.Option(min=8, help="Questions used.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Places in the answers that a step learns from.")]
LearningRate = Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")]
Soft = Annotated[bool, typer.Option("--soft", help="Learn the model's probabilities instead of the tokens it drew.")]
Seed = Annotated[int, typer.Option(min=0, help="Of answers, weights and order.")]
Blocks = Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    as_json: AsJson = False,
) -> None:
    """Train heads for the drafter medusa: each guesses one place ahead from the last hidden state."""
    from training.medusa import MedusaRecipe

    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "soft": soft, "seed": seed}
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    _run(MedusaRecipe(heads=heads, blocks=blocks), _settings(model, config), out, asked, schedule, as_json)


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
    """Train the head of the drafter redrafter: a recurrent cell over drafted tokens beside the last hidden state."""
    from training.redrafter import ReDrafterRecipe

    schedule = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "soft": soft, "seed": seed}
    asked = (prompts, count, {"temperature": temperature, "max_tokens": max_tokens})
    _run(ReDrafterRecipe(ahead=ahead, blocks=blocks), _settings(model, config), out, asked, schedule, as_json)


def _settings(model: str, config: Path | None) -> tuple[ModelConfig, TurnoutConfig]:
    """The model that `--model` means, with the configuration around it."""
    from turnout.config import DEMO_PREFIX, ModelConfig

    settings = read_config(config)
    pool = next(iter(settings.pools.values()))
    name = {"small": pool.small, "large": pool.large}.get(model, model)
    if name in settings.models:
        return settings.models[name], settings
    if model.startswith(DEMO_PREFIX) or (Path(model) / "config.json").is_file():
        return ModelConfig(path=model), settings
    raise not_found("model", model, ["small", "large", *settings.models, "a folder with a checkpoint"])


def _run(
    recipe: Recipe,
    settings: tuple[ModelConfig, TurnoutConfig],
    out: Path,
    asked: tuple[Path | None, int, dict[str, Any]],
    schedule: dict[str, Any],
    as_json: bool,
) -> None:
    """Train, write the artifact and NAME.report.json, and show what was measured."""
    if out.suffix != SUFFIX:
        raise invalid("out", f"must end in {SUFFIX}, got {out.name!r}")
    from training.head_runs import Plan, Questions
    from training.heads import Schedule
    from turnout.types import SamplingParams

    file, count, sampling = asked
    questions = Questions.of_demo(count) if file is None else Questions.of_file(file, count)
    plan = Plan(recipe, Schedule(**schedule), questions, SamplingParams(**sampling))
    report = asyncio.run(_train(settings, plan, out))
    out.with_suffix(".report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(report)
        return
    accepted = [*report["acceptance_by_depth"], *[0.0] * len(report["rank_accuracies"])]
    print_table(
        [">depth", ">best guess right", ">among the best 5", ">reached and accepted"],
        [
            [depth, f"{ranks[0]:.1%}", f"{sum(ranks[:5]):.1%}", f"{share:.1%}"]
            for depth, (ranks, share) in enumerate(zip(report["rank_accuracies"], accepted, strict=False), start=1)
        ],
    )
    typer.echo(
        f"{report['tokens_per_round']:.2f} tokens a round on held-out questions,"
        f" {report['nodes_per_round']:.0f} drafted; {out.name}: {out.stat().st_size / 2**20:.2f} MiB"
    )


async def _train(settings: tuple[ModelConfig, TurnoutConfig], plan: Plan, out: Path) -> dict[str, Any]:
    from rich.progress import Progress

    from training.head_runs import Target, train_head

    target = Target.load(settings[0], settings[1].engine)
    try:
        with Progress(console=console(stderr=True)) as bar:
            tasks: dict[str, Any] = {}

            def advance(what: str, done: int, total: int) -> None:
                stage = what.partition(",")[0]
                if stage not in tasks:
                    tasks[stage] = bar.add_task(what, total=total)
                bar.update(tasks[stage], description=what, completed=done)

            return await train_head(target, plan, out, advance)
    finally:
        await target.close()
