"""The protocol of JSONSchemaBench on a small suite: our engine covers what it declares, and a wrong one is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.foreign import bench_schemas
from benchmarks.foreign.bench_schemas import (
    LATE,
    Case,
    Tally,
    in_order,
    is_valid,
    judge,
    lines_of,
    page,
    read_suite,
    task,
)
from decoding.constraints.base import Vocabulary
from decoding.grammars.compiler import tokenizer_of
from tests.constrained import byte_compiler

SUITE: dict[str, list[dict[str, Any]]] = {
    "type": [
        {
            "schema": {"type": "integer", "minimum": 3},
            "tests": [{"data": 3, "valid": True}, {"data": 2, "valid": False}, {"data": "a", "valid": False}],
        }
    ],
    "properties": [
        {
            "schema": {"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": [1]}}},
            "tests": [{"data": {"a": 1, "b": None}, "valid": True}, {"data": {"a": 2}, "valid": False}],
        }
    ],
    "not": [{"schema": {"not": {"type": "null"}}, "tests": [{"data": 1, "valid": True}]}],
}


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    folder = tmp_path / "tests" / bench_schemas.DRAFT
    folder.mkdir(parents=True)
    for keyword, schemas in SUITE.items():
        (folder / f"{keyword}.json").write_text(json.dumps(schemas), encoding="utf-8")
    return read_suite(tmp_path)


@pytest.fixture
def given(tmp_path: Path, cases: list[Case]) -> Path:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(task(cases, vocabulary())), encoding="utf-8")
    return path


def vocabulary() -> Vocabulary:
    return byte_compiler().vocabulary


def judged(engine: str, cases: list[Case], given: Path) -> tuple[Tally, dict[str, Tally]]:
    lines = list(lines_of(Path(sys.executable), engine, given, len(cases), limit_s=100.0))
    return judge(cases, lines, vocabulary().shared(tokenizer_of))


def test_our_engine_covers_what_it_declares(cases: list[Case], given: Path) -> None:
    whole, found = judged("ours", cases, given)
    assert (whole.schemas, whole.declared, whole.covered) == (3, 2, 2)
    assert (found["not"].declared, found["type"].covered, found["properties"].covered) == (0, 1, 1)
    assert (whole.over, whole.valid, whole.under, whole.invalid, whole.wrong) == (0, 2, 0, 3, 0)
    assert whole.drawn > 0
    assert len(whole.compiles) == 2
    text = page({"ours": (whole, found)}, {"xgrammar": "why"}, {}, 300, {"cores": "2"}).markdown()
    assert "| ours | 3 | 2 of 3 | 2 of 3 | 100.0% | 0 of 2 | 0 of 3 |" in text
    assert "xgrammar was not measured: why." in text


def test_an_engine_that_holds_to_less_is_seen(cases: list[Case], given: Path) -> None:
    whole, found = judged("any_json", cases, given)
    assert (whole.declared, whole.covered) == (3, 1), "of the third no text was drawn that does not fit"
    assert (found["type"].under, found["type"].over) == (2, 0)
    assert whole.wrong > 0


@pytest.mark.parametrize("changed", [{"minimum": 4}, {"minimum": 2}, {"type": ["integer", "string"]}])
def test_a_changed_constraint_is_noticed(cases: list[Case], given: Path, changed: dict[str, Any]) -> None:
    """The engine is given another schema than the instances were judged by."""
    content = json.loads(given.read_text(encoding="utf-8"))
    [place] = [place for place, case in enumerate(cases) if case.keyword == "type"]
    content["schemas"][place]["schema"] |= changed
    given.write_text(json.dumps(content), encoding="utf-8")
    whole, found = judged("ours", cases, given)
    assert (whole.covered, found["type"].covered) == (1, 0)
    assert found["type"].over + found["type"].under == 1


def test_instances_are_written_in_the_form_that_engines_write() -> None:
    schema: Any = {"properties": {"b": {"properties": {"y": {}, "x": {}}}, "a": {}}}
    ordered = in_order({"c": 1, "a": [], "b": {"x": 1, "y": 2}}, schema)
    assert bench_schemas.written(ordered) == '{"b": {"y": 2, "x": 1}, "a": [], "c": 1}'
    assert in_order([{"b": 1}], True) == [{"b": 1}]


def test_texts_are_judged_by_another_validator() -> None:
    assert is_valid({"type": "integer"}, "3")
    assert not is_valid({"type": "integer"}, '"3"')
    assert not is_valid({}, "{")
    assert is_valid({"$ref": "http://localhost:1234/elsewhere.json"}, "3"), "is judged by no one"


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "engine.py"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(bench_schemas, "PROGRAM", path)


def test_a_schema_that_takes_too_long_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "import threading\nprint('ready', flush=True)\nthreading.Event().wait()\n", monkeypatch)
    lines = list(lines_of(Path(sys.executable), "ours", tmp_path, 2, limit_s=0.05))
    assert lines == [{"refused": LATE}] * 2
    tally = Tally()
    tally.add(Case("x", {}, (), ()), lines[0], [])
    assert (tally.schemas, tally.declared, tally.late) == (1, 0, 1)


def test_an_engine_that_dies_is_named_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "raise SystemExit('no such engine')\n", monkeypatch)
    with pytest.raises(RuntimeError, match="xgrammar ended before schema 0: no such engine"):
        list(lines_of(Path(sys.executable), "xgrammar", tmp_path, 2, limit_s=100.0))


def test_a_missing_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fetch_schema_tests"):
        read_suite(tmp_path)
