"""Store of results: cells by their address, and experiments by name, which list the cells they are made of."""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.grid.cells import Cell, Facts, Record
from experiments.grid.spec import ExperimentSpec
from turnout.atomic_files import write_whole
from turnout.errors import Code, TurnoutError, invalid, not_found
from turnout.json_lines import json_line

State = Literal["done", "unscored", "refused", "failed", "partial", "absent"]
Kept = Literal["runs", "references"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What comes of reading a file that another version wrote, or that is cut short; pydantic's are ValueErrors.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, TurnoutError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """An experiment as it was last run."""

    spec: ExperimentSpec
    cells: tuple[Cell, ...]
    refused: dict[str, str]


class Store:
    """A folder. Every file is there whole or not at all, even after a power cut.

    Args:
        root: the folder; made when something is written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()  # actors work in folders of their own

    def _cell(self, address: str) -> Path:
        return self.root / "cells" / address[:2] / address

    def _experiment(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise invalid("name", f"must be letters, digits and . _ - (got {name!r})")
        return self.root / "experiments" / name

    def state(self, cell: Cell) -> State:
        """How far a cell is; one that is unscored is done, but for answers that can be scored again."""
        folder = self._cell(cell.address)
        if (folder / "facts.json").is_file():
            return "unscored" if _read(folder / "facts.json").get("unscored") else "done"
        if (folder / "failure.json").is_file():
            return "refused" if _read(folder / "failure.json")["final"] else "failed"
        return "partial" if any(folder.glob("chunk-*.jsonl")) else "absent"

    def chunks(self, cell: Cell) -> dict[int, list[Record]]:
        """What has been answered, by number of the chunk."""
        found = {}
        for path in sorted(self._cell(cell.address).glob("chunk-*.jsonl")):
            # Not splitlines: it would also cut at line separators inside the texts, which JSON leaves as they are.
            with path.open("rb") as lines:
                found[int(path.stem.removeprefix("chunk-"))] = [_record(json.loads(line)) for line in lines]
        return found

    def records(self, cell: Cell) -> list[Record]:
        """All answers of a cell, in the order of the dataset."""
        return [record for _, records in sorted(self.chunks(cell).items()) for record in records]

    def facts(self, cell: Cell) -> Facts | None:
        """What was measured of a whole cell; None: it is not done."""
        path = self._cell(cell.address) / "facts.json"
        return Facts.from_dict(_read(path)) if path.is_file() else None

    def progress(self, cell: Cell) -> Facts:
        """What earlier runs of a cell measured that is gone on with."""
        folder = self._cell(cell.address)
        if not (folder / "progress.json").is_file():
            return self.facts(cell) or Facts()
        found = _read(folder / "progress.json")
        return Facts.from_dict(found["with" if (folder / found["chunk"]).is_file() else "without"])

    def failure(self, cell: Cell) -> str:
        """Why a cell failed; empty: it did not."""
        path = self._cell(cell.address) / "failure.json"
        return str(_read(path)["message"]) if path.is_file() else ""

    def save_chunk(self, cell: Cell, number: int, records: list[Record], so_far: Facts) -> None:
        """Keep a chunk of answers.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED: the disk is full; UNAVAILABLE: it cannot be written.
        """
        folder, name = self._cell(cell.address), f"chunk-{number:06d}.jsonl"
        self._write(folder / "cell.json", json.dumps(cell.as_dict(), indent=1))
        # Two files are not written at once: whether the chunk is there says which of the two holds.
        facts = {"chunk": name, "with": asdict(so_far), "without": asdict(self.progress(cell))}
        self._write(folder / "progress.json", json.dumps(facts))
        lines = (json_line(asdict(record)) + "\n" for record in records)
        self._write(folder / name, "".join(lines))

    def finish(self, cell: Cell, facts: Facts) -> None:
        """A cell is done."""
        folder = self._cell(cell.address)
        self._write(folder / "cell.json", json.dumps(cell.as_dict(), indent=1))
        self._write(folder / "facts.json", json.dumps(asdict(facts), indent=1))
        (folder / "failure.json").unlink(missing_ok=True)
        (folder / "progress.json").unlink(missing_ok=True)

    def fail(self, cell: Cell, message: str, final: bool = False) -> None:
        """A cell was not done.

        Args:
            cell: which.
            message: why.
            final: whether it would be refused again as long as nothing changes; otherwise the next run tries it.
        """
        folder = self._cell(cell.address)
        self._write(folder / "cell.json", json.dumps(cell.as_dict(), indent=1))
        self._write(folder / "failure.json", json.dumps({"message": message, "final": final}))

    def save(self, spec: ExperimentSpec, cells: list[Cell], refused: dict[str, str]) -> None:
        """Keep what an experiment is made of."""
        values = {
            "spec": spec.model_dump(mode="json"),
            "cells": [cell.as_dict() for cell in cells],
            "refused": refused,
        }
        self._write(self._experiment(spec.name) / "experiment.json", json.dumps(values, indent=1))

    def names(self) -> list[str]:
        """Of all experiments, sorted."""
        return sorted(path.parent.name for path in (self.root / "experiments").glob("*/experiment.json"))

    def load(self, name: str) -> Saved:
        """An experiment.

        Raises:
            TurnoutError: NOT_FOUND; INVALID_ARGUMENT: it cannot be read, as where another version wrote it.
        """
        path = self._there(name)
        try:
            values = _read(path)
            cells = tuple(Cell.from_dict(each) for each in values["cells"])
            return Saved(ExperimentSpec.model_validate(values["spec"]), cells, values["refused"])
        except UNREADABLE as error:
            raise invalid("experiment", f"{name!r} cannot be read: {_briefly(error)}") from None

    def _there(self, name: str) -> Path:
        path = self._experiment(name) / "experiment.json"
        if not path.is_file():
            raise not_found("experiment", name, self.names())
        return path

    def keep(self, name: str, what: Kept, values: dict[str, Any]) -> None:
        """Keep something about an experiment next to its cells."""
        self._write(self._experiment(name) / f"{what}.json", json.dumps(values, indent=1))

    def kept(self, name: str, what: Kept) -> dict[str, Any]:
        """What was kept so; empty: nothing was."""
        path = self._experiment(name) / f"{what}.json"
        return _read(path) if path.is_file() else {}

    def remove(self, name: str) -> int:
        """Delete an experiment, and of its cells those that no other one has; how many these are.

        Raises:
            TurnoutError: NOT_FOUND.
        """
        mine = self._addresses(self._there(name))
        shutil.rmtree(self._experiment(name))
        return self._delete(mine or set())

    def prune(self) -> int:
        """Delete cells that no experiment has any more, as after its code changed; how many these are."""
        return self._delete({path.name for path in (self.root / "cells").glob("*/*")})

    def _delete(self, addresses: set[str]) -> int:
        kept = set[str]()
        for name in self.names():
            mine = self._addresses(self._experiment(name) / "experiment.json")
            if mine is None:
                log.warning("the cells of %s are not known, so all are kept until it is removed", name)
                return 0
            kept |= mine
        gone = [folder for address in addresses - kept if (folder := self._cell(address)).is_dir()]
        for folder in gone:
            shutil.rmtree(folder)
        return len(gone)

    def _addresses(self, path: Path) -> set[str] | None:
        """Of an experiment's cells, also where only the rest of it is of another format; None: they cannot be read."""
        try:
            return {Cell.from_dict(each).address for each in _read(path)["cells"]}
        except UNREADABLE:
            return None

    def every_facts(self) -> Iterator[tuple[Cell, Facts, int]]:
        """Facts and number of answers of all cells that are done, for estimates."""
        unreadable = list[str]()
        for path in (self.root / "cells").glob("*/*/facts.json"):
            try:
                count = sum(len(chunk.read_bytes().splitlines()) for chunk in path.parent.glob("chunk-*.jsonl"))
                found = Cell.from_dict(_read(path.with_name("cell.json"))), Facts.from_dict(_read(path)), count
            except UNREADABLE as error:
                unreadable.append(f"{path.parent}: {_briefly(error)}")
                continue
            yield found
        if unreadable:
            log.warning("cells that cannot be read are left out: %d, the first %s", len(unreadable), unreadable[0])

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
        except OSError as error:
            code = Code.RESOURCE_EXHAUSTED if error.errno == errno.ENOSPC else Code.UNAVAILABLE
            raise TurnoutError(code, f"store: cannot write {path}: {error.strerror or error}", "store") from None


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _briefly(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _record(values: dict[str, Any]) -> Record:
    return Record(**{**values, "pieces": [tuple(piece) for piece in values["pieces"]]})
