"""Refuse tests that prove nothing: files that collect no test, tests that cannot fail, sleeping instead of polling."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

# A call to a function that starts like this is taken to assert on the test's behalf.
ASSERTING = ("assert_", "check_", "expect_", "raises", "warns")
# Calls that assert by themselves: Playwright's.
ASSERTIONS = frozenset({"expect"})


def check(tests: Path) -> list[str]:
    """Every fault under the folder of tests."""
    faults = [
        f"{path}: tests/ holds no packages; a package of the same name would be shadowed"
        for path in sorted(tests.rglob("__init__.py"))
    ]
    for path in sorted(tests.rglob("*.py")):
        if path.name != "__init__.py":
            faults += [f"{path}{fault}" for fault in check_file(path.read_text(encoding="utf-8"), path.name)]
    return faults


def check_file(source: str, name: str) -> Iterator[str]:
    """Faults of one file, each starting with `:line` or `:`."""
    tree = ast.parse(source)
    tests = list(_tests(tree))
    if name.startswith("test_"):
        if not tests:
            yield ": collects no test"
        for line in _sleeps(tree):
            yield f":{line}: sleeps outside a polling loop"
    elif tests:
        yield f":{tests[0].lineno}: {tests[0].name} is never collected; the file's name must start with test_"
    asserting = _asserting_functions(tree) | ASSERTIONS
    for test in tests:
        if not _can_fail(test, asserting):
            yield f":{test.lineno}: {test.name} has nothing that could fail"


def _tests(tree: ast.Module) -> Iterator[Function]:
    for node in tree.body:
        if isinstance(node, Function) and node.name.startswith("test"):
            yield node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for inner in node.body:
                if isinstance(inner, Function) and inner.name.startswith("test"):
                    yield inner


def _asserting_functions(tree: ast.Module) -> frozenset[str]:
    """Names of functions in this file that assert, so that a test may leave it to them."""
    functions = (node for node in ast.walk(tree) if isinstance(node, Function))
    return frozenset(function.name for function in functions if _can_fail(function, frozenset()))


def _can_fail(function: Function, asserting: frozenset[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not (isinstance(node.test, ast.Constant) and node.test.value):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in asserting or called.startswith(ASSERTING) or _is_checked(node):
                return True
    return False


def _is_checked(call: ast.Call) -> bool:
    """Whether it is a subprocess whose exit code is asserted by `check=True`."""
    return any(
        keyword.arg == "check" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def _sleeps(tree: ast.Module) -> Iterator[int]:
    polled = {id(call) for loop in ast.walk(tree) if isinstance(loop, ast.While) for call in ast.walk(loop)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            yields_only = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if id(node) not in polled and not yields_only:
                yield node.lineno


def main() -> int:
    """Check the tests of the repository this script stands in."""
    root = Path(__file__).resolve().parent.parent
    faults = check(root / "tests")
    for fault in faults:
        sys.stderr.write(f"{fault.removeprefix(f'{root}/')}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
