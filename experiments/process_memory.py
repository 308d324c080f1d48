"""Memory of a process and everything it started, shared pages counted once (Linux)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

KIB = 1024


def tree(root: int) -> list[int]:
    """Process ids of `root` and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        children[int(fields[1])].append(int(stat.parent.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting.extend(children[pid])
    return found


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
