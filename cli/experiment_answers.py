"""`turnout experiment answers`: what every way of answering said to a prompt."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import print_table
from turnout.errors import invalid
from turnout.json_lines import json_line

if TYPE_CHECKING:
    from collections.abc import Iterable

LISTED = 20


def answers(
    name: Annotated[str, typer.Argument(help="Of an experiment, as in its file.")],
    prompt: Annotated[str, typer.Option(help="Only this prompt, by its id; with all of every answer.")] = "",
    dataset: Annotated[str, typer.Option(help="Only this dataset.")] = "",
    store: Annotated[Path, typer.Option("--store", help="Where results are kept.")] = Path(".runs/experiments"),
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known, a JSON object a line.")] = False,
) -> None:
    """Look at answers prompt by prompt, those first on which ways of answering differ most.

    Without `--prompt`, lists the first prompts; with `--json`, every prompt and every way, nothing left out.
    """
    from experiments.grid.store import Store
    from experiments.reports.answers import every_answer
    from experiments.reports.table import read_table

    kept = Store(store)
    groups = [group for group in read_table(kept.load(name), kept).every if dataset in ("", group.dataset)]
    if not groups:
        raise invalid("dataset", f"experiment {name!r} has no answers to {dataset or 'any dataset'}")
    found = (each for each in every_answer(groups) if prompt in ("", each["prompt"]))
    first = next(found, None)
    if first is None:
        raise invalid("prompt", f"experiment {name!r} asked no prompt with the id {prompt!r}")
    show = _print_lines if as_json else _print_whole if prompt else _print_list
    show(chain([first], found))


def _print_lines(found: Iterable[dict[str, Any]]) -> None:
    for each in found:
        typer.echo(json_line(each))


def _print_whole(found: Iterable[dict[str, Any]]) -> None:
    for each in found:
        typer.echo(f"{each['dataset']}, {each['pool']}, {each['load']}: {each['prompt']} (seed {each['seed']})")
        for label, record in each["ways"].items():
            said = record["error"] or record["note"]
            typer.echo(
                f"\n{label}: score {_score(record['score'])}, {record['tokens']} tokens, {record['by_large']} written"
                f" by the large model, {record['wall_s']:.3f} s{f' ({said})' if said else ''}"
            )
            typer.echo(record["text"])
        typer.echo("")


def _print_list(found: Iterable[dict[str, Any]]) -> None:
    rows = []
    for each in found:
        known = [record["score"] for record in each["ways"].values() if record["score"] is not None]
        ends = (_score(max(known)), _score(min(known))) if known else ("-", "-")
        rows.append([each["prompt"], each["dataset"], each["load"], each["seed"], len(each["ways"]), *ends])
    print_table(["prompt", "dataset", "load", ">seed", ">ways", ">best", ">worst"], rows[:LISTED])
    if len(rows) > LISTED:
        typer.echo(f"{len(rows) - LISTED} more; one of them: --prompt ID, all: --json")


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
