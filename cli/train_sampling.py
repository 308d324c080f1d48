"""`turnout train autodeco`: heads that say with which temperature and top-p each token is drawn."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.artifact_output import keep
from cli.output import print_json, shown_progress
from cli.train_options import (
    AsJson,
    BatchSize,
    Config,
    LearningRate,
    ModelName,
    Out,
    Seed,
    Steps,
    check_artifact,
    configured_model,
)
from turnout.errors import invalid

if TYPE_CHECKING:
    from pool.text import TextTokenizer
    from training.autodeco import AutoDecoRecipe, TrainedHeads
    from turnout.config import ModelConfig, TurnoutConfig

Texts = Annotated[
    Path | None,
    typer.Option(help='File with a text a line, {"prompt": "...", "answer": "..."}; absent: worked arithmetic.'),
]
Count = Annotated[int, typer.Option(min=8, help="Texts used, every eighth of them to measure.")]
Inner = Annotated[int, typer.Option(min=1, max=4096, help="Width of the heads' hidden layers.")]


def register(app: typer.Typer) -> None:
    """Add the command to `turnout train`."""
    app.command("autodeco")(autodeco)


def autodeco(
    out: Out,
    model: ModelName = "large",
    config: Config = None,
    texts: Texts = None,
    count: Count = 512,
    steps: Steps = 600,
    batch_size: BatchSize = 128,
    learning_rate: LearningRate = 1e-3,
    inner: Inner = 256,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train the heads of the processor autodeco on worked answers: temperature and top-p by hidden state."""
    check_artifact(out)
    from training.autodeco import AutoDecoRecipe

    recipe = AutoDecoRecipe(inner=inner)
    schedule = replace(recipe.schedule, steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed)
    recipe = replace(recipe, schedule=schedule)
    trained = asyncio.run(_train(configured_model(model, config), recipe, out, texts, count))
    report = keep(trained.artifact, trained.report, out)
    if as_json:
        print_json(report)
        return
    typer.echo(f"{out.name}: {out.stat().st_size / 2**10:.0f} KiB; held out: {json.dumps(report['heldout'])}")


async def _train(
    settings: tuple[ModelConfig, TurnoutConfig], recipe: AutoDecoRecipe, out: Path, texts: Path | None, count: int
) -> TrainedHeads:
    from training.autodeco import train_autodeco
    from training.head_runs import Target

    target = Target.load(settings[0], settings[1].engine)
    try:
        found = _worked(target.tokenizer, texts, count, recipe.schedule.seed)
        with shown_progress() as advance:
            return await train_autodeco(target.model, target.logits, found, recipe, out.with_suffix(".run"), advance)
    finally:
        await target.close()


def _worked(tokenizer: TextTokenizer, file: Path | None, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Questions with their answers, as token ids; each answer ends."""
    import random

    from decoding.text import continue_with
    from training.data import arithmetic
    from turnout.calls import ChatMessage

    if file is not None:
        pairs = _read(file, count)
    else:
        rng = random.Random(f"autodeco-{seed}")
        problems = [arithmetic.draw_training(rng, rng.choice(arithmetic.DIFFICULTIES)) for _ in range(count)]
        pairs = [(problem.prompt, problem.answer) for problem in problems]
    end = tuple(sorted(tokenizer.eos_ids)[:1])
    prompts = [tokenizer.encode_chat([ChatMessage("user", prompt)]) for prompt, _ in pairs]
    answers = [[*continue_with(tokenizer, answer, parse_special=False), *end] for _, answer in pairs]
    return list(zip(prompts, answers, strict=True))


def _read(file: Path, count: int) -> list[tuple[str, str]]:
    pairs = []
    lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    for number, line in enumerate(lines[:count], 1):
        try:
            value = json.loads(line)
            pairs.append((str(value["prompt"]), str(value["answer"])))
        except (ValueError, KeyError, TypeError):
            wanted = '{"prompt": "...", "answer": "..."}'
            raise invalid("texts", f"line {number} of {file.name!r} must be {wanted}") from None
    return pairs
