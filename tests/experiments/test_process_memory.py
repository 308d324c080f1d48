"""Memory of a process tree, on real processes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

from experiments.process_memory import own_bytes, proportional_bytes, tree


def test_counts_what_a_grandchild_holds() -> None:
    hold = "import sys; data = bytearray(64 << 20); print('ready', flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {hold!r}]))"
    command = [sys.executable, "-c", outer]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        pids = tree(process.pid)
        assert process.pid in pids
        assert len(pids) == 2
        assert proportional_bytes(pids) > 64 << 20
        assert process.pid in tree(os.getpid())
        process.stdin.close()


def test_what_a_process_allocated_is_its_own_and_what_it_maps_is_not(tmp_path: Path) -> None:
    size = 64 << 20
    file = tmp_path / "large"
    file.write_bytes(bytes(size))
    before = own_bytes(os.getpid())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # every page is there now
        assert own_bytes(os.getpid()) - before < size / 8
    with mmap.mmap(-1, size) as held:  # from the kernel: an allocator might have as much to give again
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
        assert own_bytes(os.getpid()) - before > 0.9 * size
