"""Our engine side by side with its peers: decoding, prefill, mixed batches, prefix reuse, overhead, speculation."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Report, command_line, note, run
from benchmarks.peers import turns
from benchmarks.peers.base import Setup
from benchmarks.peers.checkpoints import SHAPES, random_checkpoint
from benchmarks.peers.plan import SIDES, Side, pair_work, random_model_work
from benchmarks.peers.remote import PeerError, RemotePeer
from benchmarks.peers.table import Comparison, page
from benchmarks.peers.workloads import Workload
from experiments import machine
from turnout.config import ModelConfig, model_path

PAIR = "demo pair"
SUBJECTS = (*SHAPES, PAIR)
PROBLEMS_PER_ROUND = 24
RESULT = Path("docs/results/peers.md")


class Bench:
    """One run.

    Args:
        dtype: of weights and arithmetic, on every side.
        threads: CPU threads of a forward, on every side.
        rounds: that count.
        peers_python: interpreter of the peers' environment.
    """

    def __init__(self, dtype: str, threads: int, rounds: int, peers_python: Path) -> None:
        self.dtype = dtype
        self.threads = threads
        self.rounds = rounds
        self._pythons = {"own": Path(sys.executable), "peers": peers_python}
        setting = {"dtype": dtype, "threads": threads, "rounds": rounds}
        self.comparison = Comparison(machine.describe(), setting)

    def find_peers(self, names: list[str]) -> None:
        """Ask each engine whether it can run here, and note what it is or what it lacks."""
        for name in names:
            side = SIDES[name]
            python = self._pythons[side.environment]
            if not python.is_file():
                self.comparison.missing[name] = side.install
                continue
            try:
                with RemotePeer(_module(side), python, self.threads) as peer:
                    missing = peer.missing()
                    if missing is None:
                        self.comparison.versions[name] = peer.versions()
                    else:
                        self.comparison.missing[name] = f"{missing} ({side.install})"
            except PeerError as error:
                self.comparison.missing[name] = f"{error} ({side.install})"
        for name, missing in self.comparison.missing.items():
            note(f"{name} is not measured, not installed: {missing}")

    async def measure(self, subject: str, folder: Path) -> None:
        """Measure all workloads of a subject, whose engines are loaded once."""
        if subject == PAIR:
            large, small = _demo("large"), _demo("small")
            work = pair_work(_problems((self.rounds + 1) * PROBLEMS_PER_ROUND), PROBLEMS_PER_ROUND)
        else:
            large, small = random_checkpoint(subject, folder), None
            work = random_model_work()
        with ExitStack() as stack:
            engines, failures = self._load(work, large, small, stack)
            for workload, names in work.items():
                note(f"{subject}: {workload.name}")
                able = {name: engines[name] for name in names if name in engines}
                outcome = await turns.measure(workload, able, names[0], self.rounds)
                outcome.failures.update({name: failures[name] for name in names if name in failures})
                self.comparison.subjects.setdefault(subject, []).append(outcome)

    def _load(
        self, work: dict[Workload, tuple[str, ...]], large: Path, small: Path | None, stack: ExitStack
    ) -> tuple[dict[str, RemotePeer], dict[str, str]]:
        engines: dict[str, RemotePeer] = {}
        failures: dict[str, str] = {}
        wanted = {name for names in work.values() for name in names}
        for name, side in SIDES.items():
            if name not in wanted or name not in self.comparison.versions:
                continue
            peer = stack.enter_context(RemotePeer(_module(side), self._pythons[side.environment], self.threads))
            draft = str(small) if side.draft else None
            try:
                peer.setup(Setup(str(large), self.dtype, self.threads, draft))
                engines[name] = peer
            except PeerError as error:
                failures[name] = f"loading: {error}"
        return engines, failures


def _module(side: Side) -> str:
    return f"benchmarks.peers.{side.module}"


def _demo(role: str) -> Path:
    return model_path(ModelConfig(path=f"demo:{role}")).resolve()


def _problems(count: int) -> list[list[int]]:
    """Held-out arithmetic, as the demo's chat template writes it."""
    from pool.text import TextTokenizer
    from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
    from turnout.calls import ChatMessage

    tokenizer = TextTokenizer(_demo("large"))
    problems = heldout(MIDDLE_DIFFICULTY, count)
    return [tokenizer.encode_chat([ChatMessage("user", problem.prompt)]) for problem in problems]


async def measure(options: argparse.Namespace) -> Report:
    """Measure all subjects; the page is saved after each of them."""
    bench = Bench(options.dtype, options.threads, options.rounds, options.peers_python.absolute())
    bench.find_peers([name for name in SIDES if name in options.engines])
    with tempfile.TemporaryDirectory(prefix="turnout-peers-") as temporary:
        for subject in options.subjects:
            await bench.measure(subject, (options.checkpoints or Path(temporary)).absolute())
            if options.out is not None:
                page(bench.comparison).save(options.out)
    return page(bench.comparison)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT)
    made.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    made.add_argument("--engines", nargs="+", choices=sorted(SIDES), default=list(SIDES))
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--peers-python", type=Path, default=Path(".venv-peers/bin/python"))
    made.add_argument("--checkpoints", type=Path, help="where to keep the random models; absent: a temporary folder")
    return made


if __name__ == "__main__":
    run(parser(), measure)
