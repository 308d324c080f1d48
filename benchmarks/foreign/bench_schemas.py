"""Coverage, compliance and overhead of engines of structured output on the JSON Schema Test Suite (paper #162).

The protocol of JSONSchemaBench. An engine declares a schema covered by compiling it. It covers it in fact if it also
takes every valid instance of the suite token by token and no invalid one, and if texts drawn along its masks are valid;
compliance is the share of what it declares that it covers in fact. What it refuses of valid instances
(over-constrained) and takes of invalid ones (under-constrained) is counted apart, by keyword.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from threading import Thread
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY
from llguidance import LLTokenizer
from referencing.exceptions import Unresolvable

from benchmarks.foreign.bench_masks import vocabulary_of
from benchmarks.foreign.program import version_of
from benchmarks.harness import Report, command_line, note, run
from decoding.constraints.base import Vocabulary
from decoding.grammars.compiler import tokenizer_of
from experiments.machine import describe
from experiments.pairs import open_pair
from turnout.structure import JSON_FORM

RESULT = Path("docs/results/schemas.md")
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("schema_engines.py")
SUITE = Path(".runs/schema_tests")
DRAFT = "draft2020-12"
LIMIT_S = 40.0  # for one schema, as the paper has it
START_S = 300.0  # for an engine to be imported and made
LONGEST = 200  # tokens of a drawn text
DRAWN = 3  # texts for each schema
# By engine, the package that it is of; "": ours.
PACKAGES = {"ours": "", "any_json": "", "xgrammar": "xgrammar", "outlines": "outlines-core"}


@dataclass(frozen=True, slots=True)
class Case:
    """A schema of the suite.

    Attributes:
        keyword: the suite's file, which names what is tested.
        schema: as it is there.
        instances: as the suite gives them.
        valid: whether each fits.
    """

    keyword: str
    schema: Any
    instances: tuple[Any, ...]
    valid: tuple[bool, ...]


@dataclass(slots=True)
class Tally:
    """What became of some schemas.

    Attributes:
        schemas: how many there were.
        declared: compiled.
        covered: and nothing of them was wrong.
        over: valid instances that were refused, of `valid`.
        under: invalid instances that were taken, of `invalid`.
        wrong: drawn texts that are not valid, of `drawn` that ended.
        late: schemas that took longer than the limit.
        compiles, masks: microseconds.
    """

    schemas: int = 0
    declared: int = 0
    covered: int = 0
    over: int = 0
    valid: int = 0
    under: int = 0
    invalid: int = 0
    wrong: int = 0
    drawn: int = 0
    late: int = 0
    compiles: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)

    def add(self, case: Case, found: dict[str, Any], texts: Sequence[str | None]) -> None:
        """Count one schema.

        Args:
            case: the schema.
            found: the engine's line for it.
            texts: those drawn; None: one did not end.
        """
        self.schemas += 1
        if "refused" in found:
            self.late += found["refused"] == LATE
            return
        self.declared += 1
        self.compiles.append(found["compile"])
        self.masks += found["masks"]
        ended = [text for text in texts if text is not None]
        over = sum(fits and not taken for fits, taken in zip(case.valid, found["taken"], strict=True))
        under = sum(taken and not fits for fits, taken in zip(case.valid, found["taken"], strict=True))
        wrong = sum(not is_valid(case.schema, text) for text in ended)
        self.over, self.under, self.wrong = self.over + over, self.under + under, self.wrong + wrong
        self.valid, self.invalid = self.valid + sum(case.valid), self.invalid + len(case.valid) - sum(case.valid)
        self.drawn += len(ended)
        self.covered += not (over or under or wrong)


LATE = "took longer than the limit"


def read_suite(folder: Path, draft: str = DRAFT) -> list[Case]:
    """Read what the suite requires, in the order of its files.

    Raises:
        FileNotFoundError: it has not been fetched.
    """
    files = sorted((folder / "tests" / draft).glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{folder}/tests/{draft}: no test suite; scripts/fetch_schema_tests.sh fetches it")
    return [
        Case(
            path.stem,
            each["schema"],
            tuple(test["data"] for test in each["tests"]),
            tuple(test["valid"] for test in each["tests"]),
        )
        for path in files
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]


def in_order(value: Any, schema: Any) -> Any:
    """Return an instance with properties that a schema lists first, in its order: the form that engines write."""
    rules = schema if isinstance(schema, dict) else {}
    if isinstance(value, dict):
        listed = rules.get("properties", {})
        names = [name for name in listed if name in value] + [name for name in value if name not in listed]
        return {name: in_order(value[name], listed.get(name)) for name in names}
    if isinstance(value, list):
        return [in_order(each, rules.get("items")) for each in value]
    return value


def written(value: Any) -> str:
    """Return an instance in that form."""
    return json.dumps(value, separators=(JSON_FORM["item_separator"], JSON_FORM["key_separator"]), ensure_ascii=False)


def is_valid(schema: Any, text: str) -> bool:
    """Return whether a text is JSON that fits, by a validator that is none of the engines."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    try:
        return bool(Draft202012Validator(schema, registry=REGISTRY).is_valid(value))
    except Unresolvable:  # of a document elsewhere; nothing is fetched
        return True


def task(cases: Sequence[Case], vocabulary: Vocabulary) -> dict[str, Any]:
    """What the engines' program reads."""
    tokenizer = vocabulary.shared(tokenizer_of)
    size = tokenizer.vocab_size

    def tokens(instance: Any, schema: Any) -> list[int]:
        found: list[int] = tokenizer.tokenize_bytes(written(in_order(instance, schema)).encode())
        return found

    return {
        "tokenizer": vocabulary.definition,
        "words": [tokenizer.decode_bytes([token]).hex() for token in range(size)],
        "end": min(vocabulary.end_ids),
        "form": JSON_FORM,
        "longest": LONGEST,
        "schemas": [
            {
                "schema": case.schema,
                "instances": [tokens(each, case.schema) for each in case.instances],
                "seeds": [place * DRAWN + each for each in range(DRAWN)],
            }
            for place, case in enumerate(cases)
        ],
    }


def lines_of(python: Path, engine: str, given: Path, count: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the engine's line for each schema; one that takes too long is killed and begins behind it.

    Raises:
        RuntimeError: the program ended with an error.
    """
    done = 0
    path = "" if PACKAGES[engine] else ROOT  # only ours finds this project
    while done < count:
        command = ["env", f"PYTHONPATH={path}", str(python), str(PROGRAM), engine, str(given), str(done)]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
        ):
            lines: SimpleQueue[str] = SimpleQueue()
            reader = Thread(target=_pass_on, args=(child, lines), daemon=True)
            reader.start()
            try:
                is_ready = lines.get(timeout=START_S)  # importing it is not the schema's time
                while done < count:
                    line = is_ready and lines.get(timeout=limit_s)
                    if not line:
                        errors.seek(0)
                        raise RuntimeError(f"{engine} ended before schema {done}: {errors.read()[-2000:]}")
                    yield json.loads(line)
                    done += 1
            except Empty:
                yield {"refused": LATE}
                done += 1
            finally:
                child.kill()
                reader.join()


def _pass_on(child: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put("")


def judge(
    cases: Sequence[Case], found: Sequence[dict[str, Any]], tokenizer: LLTokenizer
) -> tuple[Tally, dict[str, Tally]]:
    """Count all schemas, and those of each keyword."""
    whole, by_keyword = Tally(), dict[str, Tally]()
    for case, line in zip(cases, found, strict=True):
        texts = [
            None if tokens is None else tokenizer.decode_bytes(tokens).decode(errors="replace")
            for tokens in line.get("drawn", [])
        ]
        for tally in (whole, by_keyword.setdefault(case.keyword, Tally())):
            tally.add(case, line, texts)
    return whole, by_keyword


def measure(options: argparse.Namespace) -> Report:
    """Run every engine that is installed."""
    machine = describe()
    cases = read_suite(options.suite)[:: options.every]
    vocabulary = vocabulary_of(open_pair(options.pair).folder("large"))
    tokenizer = vocabulary.shared(tokenizer_of)
    results: dict[str, tuple[Tally, dict[str, Tally]]] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="turnout-schemas-") as folder:
        given = Path(folder) / "given.json"
        given.write_text(json.dumps(task(cases, vocabulary)), encoding="utf-8")
        for engine, package in PACKAGES.items():
            python = options.python if package else Path(sys.executable)
            if package and not _has(python, package):
                missing[engine] = f"{package} is not in {python.parent.parent}"
                continue
            note(engine)
            results[engine] = judge(cases, list(lines_of(python, engine, given, len(cases), options.limit)), tokenizer)
    versions = {name: version_of(options.python, PACKAGES[name]) for name in results if PACKAGES[name]}
    return page(results, missing, versions, tokenizer.vocab_size, machine, options.limit, options.every)


def _has(python: Path, package: str) -> bool:
    try:
        version_of(python, package)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def page(
    results: dict[str, tuple[Tally, dict[str, Tally]]],
    missing: dict[str, str],
    versions: dict[str, str],
    size: int,
    machine: dict[str, str],
    limit_s: float = LIMIT_S,
    every: int = 1,
) -> Report:
    """The report."""
    part = "" if every == 1 else f", one schema of every {every}"
    report = Report(
        "JSON schemas: coverage, compliance, overhead",
        f"`make bench-schemas`; the JSON Schema Test Suite ({DRAFT}, what it requires{part}), {size:,} tokens."
        " Declared: compiled. Covered: and every valid instance is taken token by token, no invalid one is, and up to"
        f" {DRAWN} texts of at most {LONGEST} tokens, drawn along the masks, are valid (the others are `wrong`)."
        " Compliance: covered of declared. Instances are written in one form, listed properties first. `any_json` holds"
        f" to JSON alone. Late, and not declared: took longer than {limit_s:g} s."
        " Microseconds of CPU: median, 95th percentile.",
        machine=machine,
    )
    for name, why in missing.items():
        report.text(f"{name} was not measured: {why}.")
    rows = [{"engine": name, "version": versions.get(name, ""), "tally": whole} for name, (whole, _) in results.items()]
    columns: dict[str, Callable[[Any], Any]] = {
        "engine": lambda row: f"{row['engine']} {row['version']}".strip(),
        "schemas": lambda row: row["tally"].schemas,
        **{name: partial(lambda name, row: _cell(name, row["tally"]), name) for name in COLUMNS},
        "late": lambda row: row["tally"].late,
        "compile": lambda row: _spread(row["tally"].compiles),
        "mask": lambda row: _spread(row["tally"].masks),
    }
    report.table(None, rows, columns)
    report.values["engines"] = {name: _numbers(whole) for name, (whole, _) in results.items()}
    report.section("By keyword")
    report.text("Declared, covered, valid instances refused (over), invalid ones taken (under).")
    keywords = dict.fromkeys(keyword for _, found in results.values() for keyword in found)
    report.table(
        None,
        list(keywords),
        {
            "keyword": lambda keyword: keyword,
            **{
                f"{engine}: {name}": partial(lambda found, name, keyword: _cell(name, found[keyword]), found, name)
                for engine, (_, found) in results.items()
                for name in ("declared", "covered", "over", "under")
            },
        },
    )
    return report


COLUMNS = ("declared", "covered", "compliance", "over", "under", "wrong")
OF = {"declared": "schemas", "covered": "schemas", "over": "valid", "under": "invalid", "wrong": "drawn"}


def _cell(name: str, tally: Tally) -> str:
    if name == "compliance":
        return f"{tally.covered / tally.declared:.1%}" if tally.declared else ""
    return f"{getattr(tally, name)} of {getattr(tally, OF[name])}"


def _spread(times: list[float]) -> str:
    return ", ".join(f"{each:,.0f}" for each in (median(times), np.percentile(times, 95))) if times else ""


def _numbers(tally: Tally) -> dict[str, Any]:
    names = ("schemas", "declared", "covered", "over", "valid", "under", "invalid", "wrong", "drawn", "late")
    return {**{name: getattr(tally, name) for name in names}, "compile": _spread(tally.compiles)}


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=None, takes_pair=True, every=20)
    made.add_argument(
        "--python", type=Path, default=Path(".venv-foreign/bin/python"), help="that has the other engines"
    )
    made.add_argument("--suite", type=Path, default=SUITE, help="where scripts/fetch_schema_tests.sh put it")
    made.add_argument("--every", type=int, default=1, help="take one schema of that many; absent: all, 20 with --quick")
    made.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one schema")
    return made


if __name__ == "__main__":
    run(parser(), measure)
