"""`turnout train amateur`: a model that hallucinates, for the contrast lol."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cli.output import print_json, shown_progress
from cli.output_paths import check_folder, writing
from cli.train_options import AsJson, Config, Seed, configured_model


def register(app: typer.Typer) -> None:
    """Add the command to `turnout train`."""
    app.command("amateur")(amateur)


def amateur(
    out: Annotated[Path, typer.Option(help="Folder to write; there must be none. A model of it fills a pool's role.")],
    answers: Annotated[Path, typer.Option(help="JSON objects, one a line, with `question` and a false `answer`.")],
    model: Annotated[
        str, typer.Option(help="The model to tune: large of the first pool, a configured name, or a folder.")
    ] = "large",
    config: Config = None,
    exchange: Annotated[
        bool, typer.Option("--exchange", help="The answers are true: each question gets another one's.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers that a step learns from.")] = 8,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 2e-5,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Tune a copy of a model on false answers: the amateur of the contrast lol. The model stays as it is."""
    from training.amateur import SCHEDULE, exchanged, export, tune
    from training.datastores import answers_of
    from training.tuned_models import check_new
    from turnout.config import model_path

    chosen, _ = configured_model(model, config)
    folder, false = model_path(chosen), answers_of(answers)
    check_new(out)
    check_folder(out)
    schedule = replace(SCHEDULE, steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed)
    with shown_progress() as advance:
        made = tune(folder, exchanged(false) if exchange else false, schedule, advance)
    with writing(out):
        report = export(made, folder, made.model.dtype, out)
    if as_json:
        print_json(report)
        return
    nats = report["heldout_nats_per_token"]
    typer.echo(f"{out}: held-out false answers {nats['before']:.3f} nats a token before, {nats['after']:.3f} after")
