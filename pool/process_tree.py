"""A process and everything it started: their ids, and the memory that they take together (Linux)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

KIB = 1024


def tree(root: int) -> list[int]:
    """Process ids of `root` and all its descendants."""
    with suppress(psutil.NoSuchProcess):  # it has ended
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return [root]


def proportional_bytes(pids: list[int]) -> int:
    """Proportional set size over several processes, in bytes."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * KIB for line in lines if line.startswith("Pss:"))
    return total
