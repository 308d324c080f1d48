"""What the tests measured, told after the run (the hooks are in conftest.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.machine import describe, one_line

told: list[str] = []
machine = describe()


def tell(line: str) -> None:
    """Have a line printed when all tests have ended, and written where `--figures` says."""
    told.append(line)


def write_figures(path: Path, arguments: Sequence[str], outcomes: Mapping[str, int]) -> None:
    """A page with what was told.

    Args:
        path: of the page.
        arguments: pytest's, without those that say where to write.
        outcomes: tests by what became of them.
    """
    command = " ".join(f"'{each}'" if " " in each else each for each in ("pytest", *arguments))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items() if count)
    lines = ["# Figures that tests told", "", f"`{command}`; {one_line(machine)}. Tests: {counts}.", ""]
    path.write_text("\n".join([*lines, *(f"- {line}" for line in told), ""]), encoding="utf-8")
