"""What this machine can do: memory it may use, memory bandwidth, floating-point operations per second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.costs.resources import Machine

BUFFER_BYTES = 256 << 20
MATRIX = 1536
REPEATS = 5


def memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Memory that weights and caches on this device may take: of the GPU, or of the machine and its control group.

    Args:
        device: where the model is to live.
        root: of the file system.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_group_limits(root)])


def _group_limits(root: Path) -> list[int]:
    """Limits of the control group this process is in and of those above it; both versions of control groups."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        here = top / path.lstrip("/")
        files += [folder / name for folder in (here, *here.parents) if folder.is_relative_to(top)]
    return [limit for limit in map(_limit, files) if limit is not None]


def _limit(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file at the top, or "max"
        return None


def measure_machine(dtype: torch.dtype, device: torch.device) -> Machine:
    """Measure bandwidth and arithmetic, about half a second; the best of a few tries counts.

    Args:
        dtype: of the model.
        device: where it lives.
    """
    source = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    left = torch.ones(MATRIX, MATRIX, dtype=dtype, device=device)
    read_s = _best(lambda: source.sum(), device)
    copy_s = _best(lambda: target.copy_(source), device)
    product_s = _best(lambda: left @ left, device)
    return Machine(
        memory_bytes=memory_bytes(device),
        read_bytes_per_s=BUFFER_BYTES / read_s,
        copy_bytes_per_s=BUFFER_BYTES / copy_s,
        flops_per_s=2.0 * MATRIX**3 / product_s,
    )


def _best(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
