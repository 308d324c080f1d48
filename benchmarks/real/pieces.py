"""Pieces of a long measurement: each is kept in a JSON file when it is done, and measured once for its setting."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from experiments import machine
from turnout.atomic_files import write_whole

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
