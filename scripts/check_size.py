"""Refuse files, classes and functions that grew too long; limits and exceptions stand in pyproject.toml."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GENERATED = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """Most lines of each, and what may be longer: `path` or `path:name` -> the reason."""

    file_lines: int
    class_lines: int
    function_lines: int
    exceptions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something beyond a limit; `place` is how the table of exceptions would spell it."""

    place: str
    lines: int
    limit: int

    def __str__(self) -> str:
        return f"{self.place}: {self.lines} lines, at most {self.limit}"


def read_limits(pyproject: Path) -> Limits:
    """The limits in `[tool.turnout.size]`."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["turnout"]["size"]
    return Limits(**table)


def python_files(root: Path) -> Iterator[Path]:
    """Our Python files under `root`; hidden folders and generated code are not ours."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not any(part.startswith(".") or part in {"build", "dist"} for part in parts) and not path.name.endswith(
            GENERATED
        ):
            yield path


def measure(source: str, name: str, limits: Limits) -> Iterator[Finding]:
    """What in one file is beyond its limit."""
    num_lines = source.count("\n")
    if num_lines > limits.file_lines:
        yield Finding(name, num_lines, limits.file_lines)
    yield from _measure_definitions(ast.parse(source), f"{name}:", limits)


def _measure_definitions(node: ast.AST, prefix: str, limits: Limits) -> Iterator[Finding]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _measure_definitions(child, prefix, limits)
            continue
        limit = limits.class_lines if isinstance(child, ast.ClassDef) else limits.function_lines
        num_lines = (child.end_lineno or child.lineno) - child.lineno + 1
        if num_lines > limit:
            yield Finding(prefix + child.name, num_lines, limit)
        yield from _measure_definitions(child, f"{prefix}{child.name}.", limits)


def check(root: Path) -> list[str]:
    """Every fault under `root`: what is too long, and exceptions that nothing needs or that give no reason."""
    limits = read_limits(root / "pyproject.toml")
    found = [
        finding
        for path in python_files(root)
        for finding in measure(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix(), limits)
    ]
    places = {finding.place for finding in found}
    faults = [str(finding) for finding in found if finding.place not in limits.exceptions]
    for place, reason in limits.exceptions.items():
        if place not in places:
            faults.append(f"{place}: stands in tool.turnout.size.exceptions, but is within its limit or gone")
        elif not reason.strip():
            faults.append(f"{place}: its exception gives no reason")
    return faults


def main() -> int:
    """Check the repository this script stands in."""
    faults = check(Path(__file__).resolve().parent.parent)
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
