"""The list of faults is of this tree: each text stands where it says, and each test it names exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_its_tests_exist(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1
    ast.parse(source.replace(fault.old, fault.new))
    paths = [each for each in fault.tests if each.startswith("tests/")]
    assert paths
    for each in paths:
        path, _, name = each.partition("::")
        tests = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in tests if name else tests


def test_names_tell_faults_apart() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 0
