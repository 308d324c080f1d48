"""Cells are kept under what they depend on, and only that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.grid.code import PACKAGES
from experiments.grid.contenders import contenders
from experiments.speculation.cells import Cell, Plan, code_digest
from turnout.cost import SpeculationMeter
from turnout.sources import ROOT, SUFFIXES

TABLE = contenders()


def plan(**setting: object) -> Plan:
    return Plan("model_chain+svip", "generate, assistant_model", "free text", 0.0, 1, {"max_tokens": 64, **setting})


def test_a_cell_is_read_as_it_was_written(tmp_path: Path) -> None:
    meter = SpeculationMeter(rounds=2, emitted_tokens=3, drafted_at=[2, 1], accepted_at=[1])
    cell = Cell(plan(), [(1.0, 2, 0.5, 3)], 1, meter, 2, 5.5, {"equal": 1}, 1, 1.0, 0.1)
    assert Cell.load(plan(), tmp_path) is None
    cell.save(tmp_path)
    assert Cell.load(plan(), tmp_path) == cell
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_anything_that_is_different_is_another_cell(tmp_path: Path) -> None:
    others = [plan(max_tokens=32), plan(code="x"), Plan("copyspec", "plain", "code", 1.0, 8, {"max_tokens": 64})]
    assert len({each.path(tmp_path) for each in [plan(), *others]}) == 4
    assert plan().address == plan().address


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Our own code, to be changed."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in SUFFIXES:
                place = tmp_path / path.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "matters"),
    [
        ("engine/scheduler/batcher.py", True),
        ("experiments/speculation/measure.py", True),
        ("experiments/hf_model.py", True),
        ("experiments/replay.py", True),
        ("decoding/methods/plain.py", True),
        ("decoding/drafters/copyspec.py", True),
        ("decoding/verifiers/match.py", True),
        ("decoding/drafters/token_recycling.py", False),
        ("decoding/methods/cascade.py", False),
        ("decoding/lengths/svip.py", False),
        ("experiments/speculation/page.py", False),
        ("experiments/speculation/bench.py", False),
        ("router/policies/budget.py", False),
    ],
)
def test_a_change_matters_to_those_who_use_the_code(tree: Path, changed: str, matters: bool) -> None:
    before = code_digest(TABLE["copyspec"])
    with (tree / changed).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert (code_digest(TABLE["copyspec"], tree) != before) == matters


def test_contenders_have_code_of_their_own(tree: Path) -> None:
    names = ("plain", "copyspec", "token_recycling", "rsd_s")
    assert len({code_digest(TABLE[name], tree) for name in names}) == len(names)
