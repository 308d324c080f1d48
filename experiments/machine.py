"""What a benchmark ran on, for its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> dict[str, str]:
    """Processor, cores, memory, Python, and how busy the machine was at this moment."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_memory_bytes() / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "load average at start": f"{os.getloadavg()[0]:.1f}",
    }


def one_line(machine: dict[str, str]) -> str:
    """As a line of a report."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
