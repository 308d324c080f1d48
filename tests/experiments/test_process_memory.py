"""Memory of a process tree, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys

from experiments.process_memory import proportional_bytes, tree


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
