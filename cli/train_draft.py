"""`turnout train draft`: a small draft model for a target, cut from it and trained on its own answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import print_json, print_table, shown_progress
from cli.output_paths import check_folder, writing
from cli.train_options import AsJson, Config, Seed, configured_model
from turnout.errors import invalid

if TYPE_CHECKING:
    from training.draft.plan import DraftPlan
    from turnout.config import EngineConfig, ModelConfig

CHOSEN = "chosen"
MOST_PROMPTS = 100_000  # read of a file


def register(app: typer.Typer) -> None:
    """Add the command to `turnout train`."""
    app.command("draft")(draft)


def draft(
    model: Annotated[
        str, typer.Option(help="The target: small or large of the first pool, a configured model's name, or a folder.")
    ] = "large",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; absent: where draft: auto looks. A run continues from FOLDER.run/, left in place."
        ),
    ] = None,
    config: Config = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, a question a line, every eighth held out; absent: bundled ones.")
    ] = None,
    layers: Annotated[
        str, typer.Option(help="How many of the target's layers it keeps; chosen: by measured speed-up.")
    ] = CHOSEN,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all of it; ignored with --steps.")] = 60.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each stage, in place of a time.")] = None,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Tokens of the chain that it is judged by.")] = 4,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, max=2.0, help="Of the target's answers; may be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")] = 256,
    text: Annotated[Path | None, typer.Option(help="Plain text that it learns before the answers.")] = None,
    count_text: Annotated[
        bool, typer.Option("--count-text", help="Choose the head's ids by --text, not by the target's answers.")
    ] = False,
    hard: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Weight of the answers' tokens, relative to the probabilities.")
    ] = 0.0,
    batch_tokens: Annotated[int, typer.Option(min=16, help="Tokens that a step learns from.")] = 1024,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 1e-3,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Train a draft model for any target: its layers, its own answers, a head of the ids that pay."""
    target, engine = configured_model(model, config)
    values: dict[str, Any] = {
        "layers": _layers(layers),
        "depth": depth,
        "minutes": minutes,
        "steps": steps,
        "max_tokens": max_tokens,
        "text": text,
        "count_text": count_text,
        "hard": hard,
        "batch_tokens": batch_tokens,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    if count_text and text is None:
        raise invalid("count_text", "needs a text: give --text FILE")
    if temperature:
        values["temperatures"] = tuple(temperature)
    report = asyncio.run(_train(target, engine.engine, prompts, values, out))
    if as_json:
        print_json(report)
    else:
        _show(report)


def _layers(value: str) -> int | None:
    """A number of layers; None: chosen."""
    if value == CHOSEN:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise invalid("layers", f"must be {CHOSEN} or a number of at least 1, got {value!r}")
    return int(value)


async def _train(
    settings: ModelConfig, engine: EngineConfig, prompts: Path | None, values: dict[str, Any], out: Path | None
) -> dict[str, Any]:
    """Train, write the folder, and let `draft: auto` find it."""
    from training.draft.export import export
    from training.draft.plan import DraftPlan, bundled_questions, multiplies_bfloat16
    from training.draft.run import train_draft
    from training.head_runs import Questions, Target
    from turnout.config import model_path
    from turnout.drafts import draft_place, register, target_identity

    folder = model_path(settings)
    identity = target_identity(folder)
    place = draft_place(identity) if out is None else out
    check_folder(place)
    questions = bundled_questions() if prompts is None else Questions.of_file(prompts, MOST_PROMPTS)
    plan: DraftPlan = DraftPlan(questions, autocast=multiplies_bfloat16(), **values)
    target = Target.load(settings, engine)
    try:
        with shown_progress() as advance:
            trained = await train_draft(target, plan, engine, place.with_name(f"{place.name}.run"), advance)
        about = {"identity": identity, "digest": target.model.digest, "name": folder.name}
        with writing(place):
            report = export(trained, folder, about, target.model.dtype, place)
        return {**report, "folder": str(place), "note": register(place, identity)}
    finally:
        await target.close()


def _show(report: dict[str, Any]) -> None:
    """Print the tables of the report."""
    depth = report["depth"]
    print_table(
        ["layers", ">tokens a forward", ">row, ms", ">target, ms", f">target, {depth + 1} rows", ">bytes", ">speed-up"],
        [
            [
                " ".join(map(str, shape["layers"])),
                f"{shape['tau']:.2f}",
                *(f"{1e3 * shape[key]:.2f}" for key in ("row_s", "target_row_s", "target_chain_s")),
                f"{shape['c']:.1%}",
                f"{shape['predicted_speedup']:.2f}",
            ]
            for shape in report["shapes"]
        ],
    )
    print_table(
        ["stage", ">steps", f">accepted of {depth}", ">by depth"],
        [
            [
                stage["stage"],
                stage["steps"],
                f"{stage['accepted']:.2f}",
                " ".join(f"{share:.0%}" for share in stage["by_depth"]),
            ]
            for stage in report["stages"]
        ],
    )
    print_table(
        [">ids", ">of the answers", ">tokens a forward", ">bytes", ">MBSU"],
        [
            [int(row["ids"]), f"{row['coverage']:.1%}", f"{row['tau']:.2f}", f"{row['c']:.1%}", f"{row['mbsu']:.2f}"]
            for row in report["vocabulary"]["sweep"]
        ],
    )
    speeds = report["tokens_per_second"]
    typer.echo(
        f"{report['accepted']:.2f} of {depth} accepted on held-out prompts, MBSU {report['mbsu']:.2f} with"
        f" {report['vocabulary']['ids']} ids; tokens/s: {speeds['plain']:.1f} plain, {speeds['chain']:.1f} with chains,"
        f" {speeds['smartspec']:.1f} with smartspec; {report['folder']}"
    )
    if report["note"]:
        typer.echo(report["note"], err=True)
