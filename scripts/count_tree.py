"""Count the source tree: files and lines by package, and small files that only one other file imports.

python -m scripts.count_tree [ROOT]
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

SMALL = 40  # lines: a file below, with one importer, belongs into that importer


def main(root: Path) -> None:
    """Print the counts of a tree."""
    packages = sorted(path.parent for path in root.glob("*/__init__.py") if path.parent.name != "tests")
    files = {path: path.read_text(encoding="utf-8") for package in packages for path in package.rglob("*.py")}
    files = {path: text for path, text in files.items() if "_pb2" not in path.name}
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path, text in files.items():
        for name in _imported(ast.parse(text)):
            if name in modules and modules[name] != path:
                importers[modules[name]].add(path)
    print(f"{'package':12} {'files':>6} {'lines':>7} {'one importer':>13} {'of them small':>14}")  # noqa: T201
    totals = [0, 0, 0, 0]
    for package in packages:
        own = [path for path in files if path.is_relative_to(package)]
        once = [path for path in own if len(importers[path]) == 1 and path.name != "__init__.py"]
        small = [path for path in once if files[path].count("\n") < SMALL]
        row = [len(own), sum(files[path].count("\n") for path in own), len(once), len(small)]
        totals = [total + count for total, count in zip(totals, row, strict=True)]
        print(f"{package.name:12} {row[0]:6} {row[1]:7} {row[2]:13} {row[3]:14}")  # noqa: T201
    print(f"{'in all':12} {totals[0]:6} {totals[1]:7} {totals[2]:13} {totals[3]:14}")  # noqa: T201


def _imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
