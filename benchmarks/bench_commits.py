"""Speed of this tree and of another commit, in turns in one run: `make bench-commits BASE=v0.1`.

The other commit is checked out into a temporary worktree. Each side is the engine in a process of its own with the code
of its tree; checkpoints and prompts are the same, and the workloads are those of `bench_peers`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.harness import Comparison, Goal, Report, Side, command_line, compare, run
from benchmarks.peers.base import Setup
from benchmarks.peers.checkpoints import random_checkpoint
from benchmarks.peers.remote import ROOT, RemotePeer
from benchmarks.peers.workloads import Decode, Mixed, Prefill, Workload

ENGINE = "benchmarks.peers.turnout_engine"
WORK = (Decode(1, 32), Decode(8, 48), Mixed(requests=32, shortest=32, longest=256, tokens=64), Prefill(2000))
QUICK_SHAPES = ("35 M",)


def checkout(commit: str, folder: Path) -> Path:
    """Check a commit out into a worktree of its own."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
    return folder


async def turn(work: Workload, engine: RemotePeer, number: int) -> float:
    """Do a workload once, with the prompts of a round."""
    reading = await asyncio.to_thread(work.measure, engine, number)
    return reading.value


async def measure(options: argparse.Namespace) -> Report:
    """Let both trees do every workload on every model."""
    threads = len(os.sched_getaffinity(0))
    report = Report(
        f"This tree and {options.base}",
        f"`make bench-commits BASE={options.base}`; greedy, bfloat16, {threads} threads, random Llamas; median of"
        f" {options.rounds} rounds [smallest, largest] in which the two trees take turns.",
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base = checkout(options.base, folder / "base")
        stack.callback(subprocess.run, ["git", "worktree", "remove", "--force", str(base)], cwd=ROOT, check=True)
        rows: list[Comparison] = []
        for shape in options.shapes:
            setup = Setup(str(random_checkpoint(shape, folder)), "bfloat16", threads)
            with ExitStack() as peers:
                trees = {options.base: base, "this tree": ROOT}
                engines = {
                    name: peers.enter_context(RemotePeer(ENGINE, Path(sys.executable), threads, root))
                    for name, root in trees.items()
                }
                for engine in engines.values():
                    engine.setup(setup)
                for work in WORK:
                    old, new = (Side(name, partial(turn, work, engine)) for name, engine in engines.items())
                    case = {"model": shape, "work": work.name}
                    rows.append(await compare(case, (old, new), options.rounds, Goal(options.least)))
        report.comparisons("speed", rows, "tokens/s")
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/commits.md"), rounds=5, shapes=QUICK_SHAPES)
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with")
    parser.add_argument(
        "--shapes", nargs="+", default=("35 M", "220 M"), help="models; see benchmarks.peers.checkpoints"
    )
    parser.add_argument("--least", type=float, default=0.97, help="least ratio wanted")
    run(parser, measure)
