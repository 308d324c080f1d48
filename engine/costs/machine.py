"""What this machine can do: memory it may use, memory bandwidth, floating-point operations per second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
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


def available_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Memory on this device that is free now, or taken by files that can be read again.

    Args:
        device: where the model is to live.
        root: of the file system.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # of what was freed, for reuse
        return int(free) + kept
    left = [_left_in(folder, limit, usage) for folder, limit, usage in _groups(root)]
    free_now = int(psutil.virtual_memory().available)
    return min([free_now, *(each for each in left if each is not None)])


def _left_in(folder: Path, limit_name: str, usage_name: str) -> int | None:
    """What a control group may still take; None: it has no limit."""
    limit, usage = _number(folder / limit_name), _number(folder / usage_name)
    if limit is None or usage is None:
        return None
    lines = (folder / "memory.stat").read_text().splitlines() if (folder / "memory.stat").is_file() else []
    counts = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    total = "total_" if "total_inactive_file" in counts else ""  # of the first version: groups below included
    files = sum(counts.get(f"{total}{kind}_file", 0) for kind in ("active", "inactive"))
    return max(limit - usage + files, 0)


def _group_limits(root: Path) -> list[int]:
    """Limits of the control group this process is in and of those above it."""
    found = (_number(folder / limit_name) for folder, limit_name, _ in _groups(root))
    return [limit for limit in found if limit is not None]


def _groups(root: Path) -> list[tuple[Path, str, str]]:
    """Folders of the control group of this process and those above; the files of their limit and of their usage.

    Both versions of control groups have these.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        old = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        names = old if controllers else ("memory.max", "memory.current")
        here = top / path.lstrip("/")
        found += [(folder, *names) for folder in (here, *here.parents) if folder.is_relative_to(top)]
    return found


def _number(file: Path) -> int | None:
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
