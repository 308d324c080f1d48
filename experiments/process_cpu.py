"""CPU time of processes and of the whole machine (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """CPU time several processes have used so far; those that have ended count nothing."""
    total = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return total


def busy_seconds() -> float:
    """CPU time all processes of the machine have used since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, interrupts, soft_interrupts = (int(value) for value in fields[:7])
    return (user + nice + system + interrupts + soft_interrupts) / TICKS_PER_S
