"""An artifact and the report of what was measured of it: named so that it can be used, written both, or neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import TypeAdapter, ValidationError

from cli.output_paths import writing
from turnout.atomic_files import whole, write_whole
from turnout.errors import invalid

if TYPE_CHECKING:
    from decoding.artifacts import Artifact


def check_name(name: str, otherwise: str = "") -> None:
    """Refuse a name that no configuration could call an artifact by.

    Args:
        name: without folder and ending.
        otherwise: what else may be given.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    from decoding.artifacts import ArtifactName

    try:
        TypeAdapter(ArtifactName).validate_python(name)
    except ValidationError:
        raise invalid("out", f"must be a name of letters, digits and . _ -{otherwise}; got {name!r}") from None


def keep(artifact: Artifact, report: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write an artifact, and its report next to it as NAME.report.json.

    The report is on disk before the artifact is renamed, and renamed right after it; it names the version it is
    about, so that it cannot be mistaken for another's, even if power is lost between the two.

    Returns:
        The report with the `version`.

    Raises:
        TurnoutError: INVALID_ARGUMENT: one cannot be written; what was there before still is.
    """
    about = {"version": artifact.version, **report}
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole(_report_of(out)) as part:
            write_whole(part, _json(about))
            artifact.save(out)
    return about


def warn(report: dict[str, Any]) -> None:
    """Say what a report doubts, where it doubts something."""
    if report.get("warning"):
        typer.echo(f"warning: {report['warning']}", err=True)


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Write what was measured of several artifacts as NAME.report.json: whole, or not at all.

    Raises:
        TurnoutError: INVALID_ARGUMENT: it cannot be written.
    """
    with writing(out):
        write_whole(_report_of(out), _json(report))


def _report_of(out: Path) -> Path:
    return out.with_suffix(".report.json")


def _json(report: dict[str, Any]) -> bytes:
    return (json.dumps(report, indent=2) + "\n").encode()
