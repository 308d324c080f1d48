"""Our engine side by side with its peers: decoding, prefill, mixed batches, prefix reuse, overhead, speculation."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import note, show
from benchmarks.peers.base import Setup
from benchmarks.peers.checkpoints import SHAPES, random_checkpoint
from benchmarks.peers.plan import SIDES, Side, pair_work, random_model_work
from benchmarks.peers.remote import PeerError, RemotePeer
from benchmarks.peers.table import Comparison, to_markdown
from benchmarks.peers.turns import take_turns
from benchmarks.peers.workloads import Workload
from experiments import machine
from turnout.config import ModelConfig, model_path

PAIR = "demo pair"
SUBJECTS = (*SHAPES, PAIR)
PROBLEMS_PER_ROUND = 24
RESULTS = Path("docs/results")


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

    def measure(self, subject: str, folder: Path) -> None:
        """All workloads of a subject; its engines are loaded once and stay for all of them."""
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
                outcome = take_turns(workload, able, names[0], self.rounds)
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


def save(comparison: Comparison, folder: Path) -> None:
    """Write the page and the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.md").write_text(to_markdown(comparison))
    (folder / "peers.json").write_text(json.dumps(comparison.as_dict(), indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, results printed and not saved")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--engines", nargs="+", choices=sorted(SIDES), default=list(SIDES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers-python", type=Path, default=Path(".venv-peers/bin/python"))
    parser.add_argument("--checkpoints", type=Path, help="where to keep the random models; absent: a temporary folder")
    parser.add_argument("--out", type=Path, help=f"folder of the results; absent: {RESULTS}, nowhere with --quick")
    chosen = parser.parse_args()
    rounds = 1 if chosen.quick else chosen.rounds
    bench = Bench(chosen.dtype, chosen.threads, rounds, chosen.peers_python.absolute())
    bench.find_peers([name for name in SIDES if name in chosen.engines])
    out = chosen.out or (None if chosen.quick else RESULTS)
    with tempfile.TemporaryDirectory(prefix="turnout-peers-") as temporary:
        for subject in chosen.subjects:
            bench.measure(subject, (chosen.checkpoints or Path(temporary)).absolute())
            if out is not None:
                save(bench.comparison, out)
    show(to_markdown(bench.comparison))


if __name__ == "__main__":
    main()
