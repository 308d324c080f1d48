"""Pieces of a long measurement: each is kept in a JSON file when it is done, and measured once for its setting."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, note
from experiments import machine
from turnout.atomic_files import write_whole
from turnout.errors import TurnoutError

KEPT = "pieces"  # key of the JSON file

Values = dict[str, Any]
Measure = Callable[[str, Namespace], Awaitable[Values]]


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page, made from several pieces.

    Attributes:
        title: of the section.
        pieces: names.
        measure: measures one of them, by its name and the options; gives plain data.
        setting: what of the options its values depend on.
        write: adds tables to a report, from the values of the pieces that are there.
    """

    title: str
    pieces: tuple[str, ...]
    measure: Measure
    setting: Callable[[Namespace], Values]
    write: Callable[[Report, Mapping[str, Values]], None]


@dataclass(slots=True)
class Pieces:
    """Pieces that were measured, by name: values, setting, machine and date of each.

    Attributes:
        path: of the JSON file; None: nothing is kept.
    """

    path: Path | None
    kept: dict[str, Values] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> Pieces:
        """Read the file; without one there are no pieces."""
        if path is None or not path.is_file():
            return cls(path)
        return cls(path, json.loads(path.read_text(encoding="utf-8")).get(KEPT, {}))

    def busiest(self) -> dict[str, str] | None:
        """The machine of the piece next to which most other work ran, for a page's head; None: no piece is there."""
        machines = [piece["machine"] for piece in self.kept.values()]
        return max(machines, key=lambda each: float(each.get("load average at start", 0)), default=None)

    def has(self, name: str, setting: Values) -> bool:
        """Whether a piece was measured in this setting."""
        # As JSON writes it: a tuple is a list there.
        return name in self.kept and self.kept[name]["setting"] == json.loads(json.dumps(setting))

    def values(self, names: Iterable[str]) -> dict[str, Values]:
        """Values of those pieces that are there."""
        return {name: self.kept[name]["values"] for name in names if name in self.kept}

    async def measure(self, name: str, section: Section, options: Namespace) -> None:
        """Measure a piece and keep it, whatever happens to the next one."""
        here = machine.describe()
        values = await section.measure(name, options)
        self.kept[name] = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": here,
            "setting": section.setting(options),
            "values": values,
        }
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, (json.dumps({KEPT: self.kept}, indent=2) + "\n").encode())


def add_options(parser: ArgumentParser, sections: Items[Section]) -> None:
    """Let a command name pieces, for `measure_missing`."""
    names = [name for section in sections for name in section.pieces]
    parser.add_argument("--piece", nargs="+", choices=names, help="only these; absent: all that are not there")
    parser.add_argument("--again", action="store_true", help="measure pieces that are there too")


async def measure_missing(sections: Items[Section], options: Namespace) -> tuple[Pieces, dict[str, str]]:
    """Measure the pieces that are asked for or not there, each kept at once.

    Args:
        sections: with all pieces.
        options: `piece` names those to measure, None: all; `again`: also those that are there; `out`: the page.

    Returns:
        All pieces that are there, and by piece why it could not be measured.

    Raises:
        TurnoutError: a piece that was named cannot be measured here.
    """
    pieces = Pieces.read(options.out and options.out.with_suffix(".json"))
    failed: dict[str, str] = {}
    for section in sections:
        for name in section.pieces:
            if options.piece and name not in options.piece:
                continue
            if pieces.has(name, section.setting(options)) and not options.again:
                note(f"{name}: measured already")
                continue
            note(name)
            try:
                await pieces.measure(name, section, options)
            except TurnoutError as error:
                if options.piece:
                    raise
                failed[name] = error.message
                note(f"{name}: {error.message}")
    return pieces, failed


def write_sections(report: Report, sections: Items[Section], pieces: Pieces, failed: Mapping[str, str]) -> None:
    """Write all sections, what of them was not measured, and a table of the pieces; the JSON file gets the pieces.

    Args:
        report: that is written to.
        sections: in order.
        pieces: what was measured.
        failed: by piece, why it could not be.
    """
    for section in sections:
        report.section(section.title)
        missing = [name for name in section.pieces if name not in pieces.kept]
        if len(missing) < len(section.pieces):
            section.write(report, pieces.values(section.pieces))
        if missing:
            reasons = [f"{name} ({failed[name]})" if name in failed else name for name in missing]
            report.text(f"Not measured: {', '.join(reasons)}.")
    report.section("Pieces")
    columns = {
        "piece": lambda row: row[0],
        "measured": lambda row: row[1]["date"],
        "machine": lambda row: machine.one_line(row[1]["machine"]),
    }
    names = [name for section in sections for name in section.pieces if name in pieces.kept]
    report.table(None, [(name, pieces.kept[name]) for name in names], columns)
    report.values[KEPT] = pieces.kept
