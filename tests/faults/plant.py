"""Plant each fault into a copy of the tree and report those that the tests named with it do not catch."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that nothing was judged


def copy_tree(folder: Path) -> None:
    """Copy what is tracked, as it stands in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def outcome(folder: Path, tests: tuple[str, ...]) -> int:
    """Run the tests in the copy; the exit code of pytest."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode


def plant(folder: Path, fault: Fault) -> int:
    """Apply a fault, run its tests, take it back; the exit code of pytest."""
    path = folder / fault.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return outcome(folder, fault.tests)
    finally:
        path.write_text(source, encoding="utf-8")


def main() -> int:
    """Check the faults whose name contains what is given; how many were missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="only faults whose name contains this")
    wanted = [fault for fault in FAULTS if parser.parse_args().name in fault.name]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="faults") as made:
        folder = Path(made)
        copy_tree(folder)
        for fault in wanted:
            before, after = outcome(folder, fault.tests), plant(folder, fault)
            caught = (before, after) == (PASSED, FAILED)
            missed += not caught
            said = "caught" if caught else f"NOT CAUGHT (pytest: {before} without it, {after} with it)"
            sys.stdout.write(f"{said}: {fault.name} ({fault.file})\n")
            sys.stdout.flush()
    return missed


if __name__ == "__main__":
    sys.exit(main())
