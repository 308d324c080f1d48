"""The digest that tells one state of the sources from another."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from turnout.sources import PACKAGES, ROOT, sources_digest


def tree(folder: Path) -> Path:
    for package in PACKAGES:
        (folder / package / "part").mkdir(parents=True)
        (folder / package / "part" / "code.py").write_text("x = 1\n")
    return folder


def test_it_is_of_everything_that_a_server_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert shipped - set(PACKAGES) == {"cli", "experiments"}
    assert set(PACKAGES) <= shipped
    assert len(sources_digest()) == 16


@pytest.mark.parametrize("package", PACKAGES)
def test_every_change_is_another_state(package: str, tmp_path: Path) -> None:
    same, changed, moved = (tree(tmp_path / name) for name in ("same", "changed", "moved"))
    (changed / package / "part" / "code.py").write_text("x = 2\n")
    (moved / package / "part" / "code.py").rename(moved / package / "part" / "other.py")
    (same / package / "part" / "notes.txt").write_text("no code")
    digests = [sources_digest(root) for root in (tree(tmp_path / "first"), same, changed, moved)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_kernels_count_too(tmp_path: Path) -> None:
    first, other = tree(tmp_path / "first"), tree(tmp_path / "other")
    (other / "engine" / "part" / "kernel.cpp").write_text("int x;")
    assert sources_digest(first) != sources_digest(other)
