from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")}
EXTRAS = PROJECT["project"]["optional-dependencies"]
REQUIREMENTS = [
    Requirement(line)
    for name, lines in {"": PROJECT["project"]["dependencies"], **EXTRAS}.items()
    for line in lines
    if name != "triton" and not line.startswith("turnout[")
]


def pins() -> dict[str, str]:
    """Version by canonical name, as constraints.txt gives them."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) not in found, f"{name} is pinned twice"
            found[canonicalize_name(name)] = version
    return found


@pytest.mark.parametrize(
    ("tool", "listed"),
    [
        # Benchmarks run from the repository: the wheel is without them.
        ("hatch", [*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "benchmarks"]),
        ("import-linter", PROJECT["tool"]["importlinter"]["root_packages"]),
        ("mypy", [name for name in PROJECT["tool"]["mypy"]["files"] if name != "scripts"]),
    ],
)
def test_every_tool_knows_exactly_the_packages_that_exist(tool: str, listed: list[str]) -> None:
    assert sorted(listed) == sorted(PACKAGES), tool


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_pins_are_exact_versions() -> None:
    assert [pin for pin in pins().values() if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+|\.?post\d+)?", pin)] == []


def test_the_wheel_is_never_uploaded() -> None:
    assert "Private :: Do Not Upload" in PROJECT["project"]["classifiers"]
