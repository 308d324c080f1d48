"""Masks of llguidance, which constrains the answers, compared with those of xgrammar: compiling, and each token."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.foreign.program import version_of
from benchmarks.harness import Report, command_line, note, run
from benchmarks.random_vocabulary import random_vocabulary
from decoding.constraints.base import Vocabulary
from experiments.machine import describe
from experiments.pairs import open_pair
from turnout.structure import JSON_FORM

RESULT = Path("docs/results/masks.md")
PROGRAM = Path(__file__).with_name("time_masks.py")
LIBRARIES = ("llguidance", "xgrammar")
LARGE = 128_000
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{4,5}$"}},
    "required": ["city", "zip"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "paid"]}, "maxItems": 5},
        "place": PLACE,
    },
    "required": ["name", "age", "tags", "place"],
    "additionalProperties": False,
}
ANSWERS = (
    {"name": "Ada Lovelace", "age": 36, "tags": ["new", "paid"], "place": {"city": "London", "zip": "12345"}},
    {"name": "A rather longer name, with signs: (1)", "age": 7, "tags": [], "place": {"city": "Bern", "zip": "3011"}},
)


def vocabulary_of(folder: Path) -> Vocabulary:
    """Of a checkpoint."""
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return Vocabulary((folder / "tokenizer.json").read_text(), frozenset({end}))


def timed(python: Path, vocabulary: Vocabulary, size: int) -> dict[str, Any]:
    """Microseconds by library and kind of work."""
    given = {
        "tokenizer": vocabulary.definition,
        "end": min(vocabulary.end_ids),
        "size": size,
        "schema": SCHEMA,
        "form": JSON_FORM,
        "texts": [json.dumps(answer) for answer in ANSWERS],
    }
    with tempfile.TemporaryDirectory(prefix="turnout-masks-") as folder:
        path = Path(folder) / "given.json"
        path.write_text(json.dumps(given), encoding="utf-8")
        done = subprocess.run([str(python), str(PROGRAM), str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{PROGRAM.name} ended with status {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(options: argparse.Namespace) -> Report:
    """Time both libraries on a small vocabulary and on a large one."""
    machine, results = describe(), dict[int, dict[str, Any]]()
    small = vocabulary_of(open_pair(options.pair).folder("large"))
    size = len(json.loads(small.definition)["model"]["vocab"])
    sizes = [(small, size)] if options.quick else [(small, size), (random_vocabulary(LARGE), LARGE)]
    for vocabulary, count in sizes:
        note(f"vocabulary of {count:,}")
        results[count] = timed(options.python, vocabulary, count)
    return page(results, {name: version_of(options.python, name) for name in LIBRARIES}, machine)


def page(results: dict[int, dict[str, Any]], versions: dict[str, str], machine: dict[str, str]) -> Report:
    """The report."""
    tokens = " and ".join(f"{sum(found['tokens'])} ({size:,})" for size, found in results.items())
    report = Report(
        "Masks of two libraries",
        "`make bench-masks`; CPU time of one thread, microseconds: median, 95th percentile. A schema of four properties"
        f" with an object in it, compiled anew each time; two answers, {tokens} tokens together, walked many times. A"
        " step is a mask, and the token after it taken in.",
        machine=machine,
    )
    rows = [
        {
            "vocabulary": size,
            "work": work,
            **{name: np.percentile(found[name][work], [50, 95]).tolist() for name in LIBRARIES},
        }
        for size, found in results.items()
        for work in ("compile", "step")
    ]
    columns = {
        f"{name} {versions[name]}": partial(lambda of, row: ", ".join(f"{each:,.0f}" for each in row[of]), name)
        for name in LIBRARIES
    }
    report.table(
        "rows", rows, {"vocabulary": lambda row: f"{row['vocabulary']:,}", "work": lambda row: row["work"], **columns}
    )
    return report


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=None, takes_pair=True)
    made.add_argument("--python", type=Path, default=Path(".venv-foreign/bin/python"), help="that has both")
    return made


if __name__ == "__main__":
    run(parser(), measure)
