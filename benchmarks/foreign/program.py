"""Running a tool of the other environment, without a network."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIMIT_S = 1800
OFFLINE = ("HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "TOKENIZERS_PARALLELISM=false")


def run_module(python: Path, folder: Path, threads: int, arguments: list[str]) -> None:
    """`python -m ARGUMENTS` in a folder.

    Raises:
        RuntimeError: it failed; has the end of its output.
    """
    run_tool(python, folder, threads, arguments[0], ["-m", *arguments])


def run_tool(python: Path, folder: Path, threads: int, name: str, arguments: list[str]) -> None:
    """`python ARGUMENTS` in a folder; `name` is that of its log there.

    Raises:
        RuntimeError: it failed; has the end of its output.
    """
    log = folder / f"{name}.log"
    settings = [*OFFLINE, f"HF_HOME={folder / 'huggingface'}", f"OMP_NUM_THREADS={threads}"]
    with log.open("ab") as output:
        done = subprocess.run(
            ["env", *settings, str(python), *arguments],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    if done.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"{name} ended with status {done.returncode}: {tail}")


def version_of(python: Path, package: str) -> str:
    """Of a package in that environment."""
    code = f"import importlib.metadata as m; import sys; sys.stdout.write(m.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
