from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PACKAGES = tomllib.loads(CONFIG)["tool"]["importlinter"]["root_packages"]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """Our packages, each empty, under our contracts."""
    (tmp_path / "pyproject.toml").write_text(CONFIG, encoding="utf-8")
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("", encoding="utf-8")
    return tmp_path


def test_empty_packages_break_no_contract(skeleton: Path) -> None:
    result = lint(skeleton)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "imported", "contract"),
    [
        ("turnout", "decoding", "Arrows point down only"),
        ("decoding", "engine", "Arrows point down only"),
        ("engine", "pool", "Arrows point down only"),
        ("pool", "training", "Arrows point down only"),
        ("training", "cli", "Arrows point down only"),
        ("cli", "benchmarks", "Arrows point down only"),
        ("experiments", "benchmarks", "Arrows point down only"),
        ("decoding", "ray", "ray only in"),
        ("engine", "ray.serve", "ray only in"),
        ("engine", "redis", "redis only in"),
        ("turnout", "grpc", "grpc only in"),
        ("cli", "grpc", "grpc only in"),
        ("decoding", "transformers", "transformers only in"),
        ("cli", "torch", "torch only in"),
        ("turnout", "torch", "torch only in"),
    ],
)
def test_a_planted_import_breaks_its_contract(skeleton: Path, module: str, imported: str, contract: str) -> None:
    (skeleton / module / "planted.py").write_text(f"import {imported}\n", encoding="utf-8")
    result = lint(skeleton)
    assert result.returncode == 1, result.stdout
    (broken,) = [line for line in result.stdout.splitlines() if line.endswith("BROKEN")]
    assert broken.startswith(contract)


@pytest.mark.parametrize(
    ("module", "imported"),
    [("engine/planted.py", "transformers"), ("turnout/client.py", "grpc"), ("decoding/methods.py", "torch")],
)
def test_an_import_in_its_own_place_breaks_none(skeleton: Path, module: str, imported: str) -> None:
    (skeleton / module).write_text(f"import {imported}\n", encoding="utf-8")
    assert lint(skeleton).returncode == 0
