"""What every subcommand prints with: a console, tables, JSON, and one line for an error."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.standard_streams import shows

if TYPE_CHECKING:
    from rich.console import Console


FILE_WIDTH = 160  # columns of a table that no terminal bounds


def console(stderr: bool = False) -> Console:
    """A console on standard output, or on standard error for what a program reading the output must not see."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else FILE_WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True, width=width)


def print_json(value: Any) -> None:
    """Write one JSON document; dataclasses become objects, enums their values."""
    text = json.dumps(value, indent=2, default=_plain, ensure_ascii=False)
    if not shows(sys.stdout, text):  # escapes say the same, replacements would not
        text = json.dumps(value, indent=2, default=_plain)
    sys.stdout.write(f"{text}\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table; a column whose name begins with ">" holds numbers and is aligned to the right."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console().print(table)


def print_error(message: str) -> None:
    """Write an error as one line on standard error."""
    one_line = " ".join(message.split())
    sys.stderr.write(f"turnout: {one_line}\n")


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bar on standard error for each stage of a run, fed with (stage, done, total).

    What stands behind a comma may change while a stage lasts.
    """
    from rich.progress import Progress

    with Progress(console=console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            stage = what.partition(",")[0]
            if stage not in tasks:
                tasks[stage] = bar.add_task(what, total=total)
            bar.update(tasks[stage], description=what, completed=done)

        yield advance
