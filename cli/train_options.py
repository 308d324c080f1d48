"""Options that the commands of `turnout train` share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from turnout.errors import invalid
from turnout.whole_files import write_whole

SUFFIX = ".safetensors"

Out = Annotated[
    Path,
    typer.Option(
        help="File to write, NAME.safetensors, in the pool's folder of artifacts. A run goes on from NAME.run/."
    ),
]
Config = Annotated[Path | None, typer.Option(help="Configuration file; absent: the demo models.")]
Pool = Annotated[str | None, typer.Option(help="Which pool of it; absent: the first.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="Of the answers.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the examples.")]
Seed = Annotated[int, typer.Option(min=0, help="Of answers, splits, weights and order.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_out(path: Path) -> None:
    """Refuse a file that cannot be written, before hours of work for it.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it is a folder, or none can be made or written in where it is to be.
    """
    if path.is_dir():
        raise invalid("out", f"{path} is a folder; give a file")
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise invalid("out", f"cannot write {path}: {there} is no folder that can be written in")


def check_artifact(path: Path) -> None:
    """Refuse a file that is not to be an artifact, or cannot be written.

    Raises:
        TurnoutError: INVALID_ARGUMENT: as `check_out`, or it ends in something else.
    """
    if path.suffix != SUFFIX:
        raise invalid("out", f"must end in {SUFFIX}, got {path.name!r}")
    check_out(path)


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Write what was measured beside an artifact, as NAME.report.json: whole, or not at all.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot be written.
    """
    with writing(out):
        write_whole(out.with_suffix(".report.json"), (json.dumps(report, indent=2) + "\n").encode())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file while it is written, as on a full disk, into a refusal.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise invalid("out", f"cannot write {path}: {error.strerror or error}") from None
