"""Speed of this tree and of another commit, in turns in one run: `make bench-commits BASE=v0.1`.

The other commit is checked out into a temporary worktree. Each side is the engine in a process of its own with the code
of its tree; checkpoints and prompts are the same, and the workloads are those of `bench_peers`. The host's part of a
step is measured around layers that cost nothing, as `bench_host` does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Comparison, Goal, Report, Side, command_line, compare, run
from benchmarks.peers.base import Setup
from benchmarks.peers.checkpoints import SHAPES, TINY_VOCAB, random_checkpoint, tiny_checkpoint
from benchmarks.peers.remote import ROOT, RemotePeer
from benchmarks.peers.workloads import Decode, HostStep, Mixed, Prefill, Workload

ENGINE = "benchmarks.peers.turnout_engine"
WORK = (Decode(1, 32), Decode(8, 48), Mixed(requests=32, shortest=32, longest=256, tokens=64), Prefill(2000))
QUICK_SUBJECTS = ("35 M",)
HOST_ENGINE = "benchmarks.peers.turnout_host"
HOST_FILES = ("benchmarks/host_clock.py", "benchmarks/peers/turnout_host.py")  # an older tree has none of its own
HOST_WORK = tuple(HostStep(rows, 96, TINY_VOCAB) for rows in (1, 8, 32, 64))
HOST = "host"


def checkout(commit: str, folder: Path) -> Path:
    """Check a commit out into a worktree of its own, with this tree's way of measuring the host."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
    for name in HOST_FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


async def turn(work: Workload, engine: RemotePeer, number: int) -> float:
    """Do a workload once, with the prompts of a round."""
    reading = await asyncio.to_thread(work.measure, engine, number)
    return reading.value


@dataclass(frozen=True, slots=True)
class Trees:
    """The two that are compared.

    Attributes:
        roots: of the trees, by name; the one that the other is compared with first.
        threads: of each engine.
        rounds: of turns.
    """

    roots: dict[str, Path]
    threads: int
    rounds: int

    async def compare(
        self, engine: str, setup: Setup, work: Sequence[Workload], model: dict[str, str], goal: Goal | None
    ) -> list[Comparison]:
        """Let both trees' engines take turns at every workload."""
        with ExitStack() as stack:
            peers = {
                name: stack.enter_context(RemotePeer(engine, Path(sys.executable), self.threads, root))
                for name, root in self.roots.items()
            }
            for peer in peers.values():
                peer.setup(setup)
            rows: list[Comparison] = []
            for each in work:
                old, new = (Side(name, partial(turn, each, peer)) for name, peer in peers.items())
                rows.append(await compare({**model, "work": each.name}, (old, new), self.rounds, goal))
            return rows


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
        trees = Trees({options.base: base, "this tree": ROOT}, threads, options.rounds)
        rows: list[Comparison] = []
        for shape in (subject for subject in options.subjects if subject != HOST):
            setup = Setup(str(random_checkpoint(shape, folder)), "bfloat16", threads)
            rows += await trees.compare(ENGINE, setup, WORK, {"model": shape}, Goal(options.least))
        if rows:
            report.comparisons("speed", rows, "tokens/s")
        if HOST in options.subjects:
            setup = Setup(str(tiny_checkpoint(folder)), "float32", threads=1)  # more would wait, and count that as work
            host = await replace(trees, threads=1).compare(HOST_ENGINE, setup, HOST_WORK, {}, None)
            report.text(
                "Host time of a step: processor time of the whole process around layers that cost nothing, in"
                " float32 with one thread, prompts of 16 tokens and answers of 96."
            )
            report.comparisons("host", host, "us")
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/commits.md"), rounds=5, subjects=QUICK_SUBJECTS)
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with")
    subjects = (*SHAPES, HOST)
    parser.add_argument(
        "--subjects", nargs="+", choices=subjects, default=subjects, help=f"models; {HOST}: layers that cost nothing"
    )
    parser.add_argument("--least", type=float, default=0.97, help="least ratio wanted")
    run(parser, measure)
