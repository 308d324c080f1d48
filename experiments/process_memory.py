"""Memory of a process and everything it started, shared pages counted once (Linux)."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pool.process_tree import KIB
from pool.process_tree import proportional_bytes as proportional_bytes
from pool.process_tree import tree as tree

SAMPLING_S = 0.002


def own_bytes(pid: int) -> int:
    """Resident memory that a process allocated, files it only maps left out: what others map too does not change it."""
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(field[1]) * KIB for field in fields if field[0] in ("RssAnon:", "RssShmem:"))


@contextmanager
def watched_growth() -> Iterator[Callable[[], int]]:
    """Watch the memory that this process allocated, native code's included, by sampling what of it is resident.

    Files that it maps are left out: the kernel takes their pages back, and reading them again is no growth. Garbage is
    collected first, and memory that the allocator kept from earlier work given back: freed or used again meanwhile, it
    would hide as much growth.

    Yields:
        A function that says by how many bytes the process was ever larger than at the start.
    """
    gc.collect()
    give_back_freed_memory()
    process = os.getpid()
    before = peak = own_bytes(process)
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(SAMPLING_S):
            peak = max(peak, own_bytes(process))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: peak - before
    finally:
        ended.set()
        watcher.join()


def give_back_freed_memory() -> None:
    """Return what was freed but is still resident to the system, where the C library can (glibc's `malloc_trim`)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
