"""Cells are kept under what they depend on, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.speculation.cells import Cell, Plan, Source, code_digest, read_sources
from experiments.speculation.contenders import contenders
from turnout.cost import SpeculationMeter

TABLE = contenders()


def plan(**setting: object) -> Plan:
    return Plan("model_chain+svip", "generate, assistant_model", "free text", 0.0, 1, {"max_tokens": 64, **setting})


def test_a_cell_is_read_as_it_was_written(tmp_path: Path) -> None:
    meter = SpeculationMeter(rounds=2, emitted_tokens=3, drafted_at=[2, 1], accepted_at=[1])
    cell = Cell(plan(), [(1.0, 2, 0.5, 3)], meter, 2, 5.5, {"equal": 1}, 1, 1.0, 0.1)
    assert Cell.load(plan(), tmp_path) is None
    cell.save(tmp_path)
    assert Cell.load(plan(), tmp_path) == cell
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_anything_that_is_different_is_another_cell(tmp_path: Path) -> None:
    others = [plan(max_tokens=32), plan(code="x"), Plan("copyspec", "plain", "code", 1.0, 8, {"max_tokens": 64})]
    assert len({each.path(tmp_path) for each in [plan(), *others]}) == 4
    assert plan().address == plan().address


# A source tree in which copyspec is made of aded, and token_recycling stands alone.
TREE = {
    "engine/runner.py": "run",
    "drafters/copyspec.py": "from decoding.drafters.aded import it",
    "drafters/aded.py": "it",
    "drafters/token_recycling.py": "alone",
    "drafters/_shared.py": "shared",
    "lengths/fixed.py": "fixed",
    "lengths/svip.py": "svip",
}


def digest(tree: dict[str, str], name: str = "copyspec") -> str:
    return code_digest(TABLE[name], {Path(file): Source.of(text) for file, text in tree.items()})


@pytest.mark.parametrize(
    ("changed", "matters"),
    [
        ("engine/runner.py", True),
        ("drafters/copyspec.py", True),
        ("drafters/aded.py", True),
        ("drafters/_shared.py", True),
        ("lengths/fixed.py", True),
        ("lengths/svip.py", False),
        ("drafters/token_recycling.py", False),
    ],
)
def test_a_change_matters_to_those_who_use_the_code(changed: str, matters: bool) -> None:
    edited = TREE | {changed: "changed; from decoding.drafters.aded import it"}
    assert (digest(edited) != digest(TREE)) == matters


def test_the_real_code_is_read() -> None:
    sources = read_sources()
    kept = {path.name for path in sources}
    assert {"runner.py", "speculation.py", "measure.py", "copyspec.py"} <= kept
    assert "page.py" not in kept
    assert code_digest(TABLE["copyspec"], sources) != code_digest(TABLE["token_recycling"], sources)
