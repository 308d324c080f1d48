"""Datasets: rows of a file, or held-out problems of a shipped task."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.grid.scoring import DemoChoice, Item, ScorerChoice
from experiments.grid.spec import DatasetChoice
from training.calibration_data import DEMO
from training.data.problem import Problem
from training.router_runs import asked_for_shipped
from turnout.errors import TurnoutError, invalid

DEMO_COUNT = 40
DEMO_SEED = 43  # not the seeds of calibrations, tests and trainings


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows to ask.

    Attributes:
        name: in reports.
        items: with ids that differ.
        chat: whether prompts are chat messages.
        scorer: of the answers.
        digest: 32 hexadecimal digits of all that is asked and how it is scored.
    """

    name: str
    items: tuple[Item, ...]
    chat: bool
    scorer: Any
    digest: str


def open_dataset(choice: DatasetChoice) -> Dataset:
    """Read a dataset, whole: a row at fault is found before anything runs.

    Raises:
        TurnoutError: INVALID_ARGUMENT: names the dataset, the row and the field.
    """
    where = f"datasets.{choice.label}"
    items, scorer = _demo(choice) if choice.demo is not None else _rows(choice, where)
    if not items:
        raise invalid(where, "has no rows")
    for number, item in enumerate(items, start=1):
        missing = next((name for name in scorer.needs if item.fields.get(name) is None), None)
        if missing is not None:
            raise invalid(where, f"row {number} ({item.id}): lacks {missing!r}, which the scorer {scorer.kind} needs")
    return Dataset(choice.label, items, choice.chat, scorer, _digest(choice, items, scorer))


def _demo(choice: DatasetChoice) -> tuple[tuple[Item, ...], ScorerChoice]:
    """Problems of all difficulties alike, none of which the pair or its routers learnt from."""
    assert choice.demo is not None
    task: Any = DEMO[choice.demo]
    count = choice.count or DEMO_COUNT
    each = -(-count // len(task.DIFFICULTIES))
    try:
        grades = [_unseen(choice.demo, grade, each) for grade in task.DIFFICULTIES]
    except ValueError as error:
        raise invalid(f"datasets.{choice.label}.count", str(error)) from None
    problems = [problem for level in zip(*grades, strict=True) for problem in level][:count]
    items = tuple(Item(f"{choice.demo}-{number}", each.prompt, asdict(each)) for number, each in enumerate(problems))
    return items, DemoChoice(kind="demo", task=choice.demo)


def _unseen(kind: str, grade: int, count: int) -> list[Problem]:
    """Held-out problems of one grade, but for those that the pair's routers learnt from.

    Raises:
        ValueError: there are not that many.
    """
    task: Any = DEMO[kind]
    asked, found = count, list[Problem]()
    while len(found) < count:
        problems = task.heldout(grade, asked, seed=DEMO_SEED)
        found = [problem for problem in problems if problem.key not in asked_for_shipped(kind)][:count]
        asked += count - len(found)
    return found


def _rows(choice: DatasetChoice, where: str) -> tuple[tuple[Item, ...], ScorerChoice]:
    assert choice.scorer is not None
    path = Path(str(choice.path)).expanduser()
    items: list[Item] = []
    seen: set[str] = set()
    for number, row in enumerate(_read(path, where), start=1):
        if choice.count is not None and len(items) == choice.count:
            break
        prompt = row.get(choice.prompt)
        if not isinstance(prompt, str) or not prompt.strip():
            raise invalid(where, f"row {number}: {choice.prompt!r} must be text that is not empty")
        name = str(row.get(choice.id, number))
        if name in seen:
            raise invalid(where, f"row {number}: {choice.id} {name!r} was given before")
        seen.add(name)
        items.append(Item(name, prompt, row))
    return tuple(items), choice.scorer


def _read(path: Path, where: str) -> Iterator[dict[str, Any]]:
    try:
        yield from _parquet(path, where) if path.suffix == ".parquet" else _lines(path, where)
    except OSError as error:
        raise invalid(where, f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise invalid(where, f"{path.name} is not UTF-8 text") from None


def _lines(path: Path, where: str) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise invalid(where, f"{path.name}, line {number}: is no JSON ({error.msg})") from None
            if not isinstance(row, dict):
                raise invalid(where, f"{path.name}, line {number}: must be an object")
            yield row


def _parquet(path: Path, where: str) -> Iterator[dict[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise invalid(where, "Parquet needs pyarrow, which is not installed; JSON lines work without it") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, TurnoutError):
        raise
    except Exception as error:  # pyarrow has no common class for what is wrong with a file
        raise invalid(where, f"cannot read {path.name}: {error}") from None


CHANGES_NOTHING = {"key_file"}  # of a scorer: no part of what is scored, nor how


def _digest(choice: DatasetChoice, items: tuple[Item, ...], scorer: Any) -> str:
    whole = hashlib.blake2b(digest_size=16)
    whole.update(
        json.dumps([choice.chat, scorer.model_dump(mode="json", exclude=CHANGES_NOTHING)], sort_keys=True).encode()
    )
    for item in items:
        used = {name: item.fields.get(name) for name in sorted({*scorer.needs, "answer"})}
        whole.update(json.dumps([item.id, item.prompt, used], sort_keys=True, default=str).encode() + b"\n")
    return whole.hexdigest()
