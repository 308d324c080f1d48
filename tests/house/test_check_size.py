from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_size import check

PYPROJECT = """
[tool.turnout.size]
file_lines = 20
class_lines = 10
function_lines = 5

[tool.turnout.size.exceptions]
"""


def function(name: str, lines: int, indent: str = "") -> str:
    """A function of so many lines."""
    return f"{indent}def {name}():\n" + f"{indent}    pass\n" * (lines - 1)


def class_of(name: str, lines: int) -> str:
    """A class of so many lines, in methods that are within their limit."""
    return f"class {name}:\n" + "    x = 1\n" * (lines - 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (tmp_path / "pkg").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("x = 1\n" * 20, []),
        ("x = 1\n" * 21, ["pkg/a.py: 21 lines, at most 20"]),
        (function("f", 5), []),
        (function("f", 6), ["pkg/a.py:f: 6 lines, at most 5"]),
        ("async " + function("f", 6), ["pkg/a.py:f: 6 lines, at most 5"]),
        ("class C:\n" + function("f", 6, "    "), ["pkg/a.py:C.f: 6 lines, at most 5"]),
        ("if True:\n" + function("f", 6, "    "), ["pkg/a.py:f: 6 lines, at most 5"]),
        (class_of("C", 10), []),
        (class_of("C", 11), ["pkg/a.py:C: 11 lines, at most 10"]),
    ],
)
def test_what_is_too_long_is_found(root: Path, source: str, faults: list[str]) -> None:
    (root / "pkg" / "a.py").write_text(source, encoding="utf-8")
    assert check(root) == faults


def test_an_exception_with_a_reason_is_honoured(root: Path) -> None:
    (root / "pkg" / "a.py").write_text(function("f", 6), encoding="utf-8")
    with (root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('"pkg/a.py:f" = "one table, read from top to bottom"\n')
    assert check(root) == []


@pytest.mark.parametrize(
    ("entry", "says"),
    [('"pkg/a.py:f" = " "', "gives no reason"), ('"pkg/gone.py" = "old"', "within its limit or gone")],
)
def test_an_exception_without_use_or_reason_is_a_fault(root: Path, entry: str, says: str) -> None:
    (root / "pkg" / "a.py").write_text(function("f", 6 if "a.py" in entry else 5), encoding="utf-8")
    with (root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(f"{entry}\n")
    (fault,) = check(root)
    assert says in fault


def test_what_is_not_ours_is_not_measured(root: Path) -> None:
    for place in (".venv/a.py", "build/a.py", "pkg/x_pb2.py", "pkg/x_pb2_grpc.py"):
        path = root / place
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" * 100, encoding="utf-8")
    assert check(root) == []
