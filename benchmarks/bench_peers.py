"""Our engine side by side with its peers: decoding, prefill, mixed batches, prefix reuse, overhead, speculation."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Report, command_line, note, run
from benchmarks.peers import turns
from benchmarks.peers.base import Setup
from benchmarks.peers.checkpoints import SHAPES, random_checkpoint
from benchmarks.peers.overview import STEM, overview, page_of
from benchmarks.peers.plan import REAL_TEXT, SIDES, Side, pair_work, random_model_work, real_text_work
from benchmarks.peers.remote import PeerError, RemotePeer
from benchmarks.peers.table import Comparison, page
from benchmarks.peers.workloads import Workload
from experiments import machine, real_model
from experiments.pairs import DEMO, Pair, open_pair
from training.data import real_text

PAIR = "demo pair"  # or the one that --pair names
REAL = "real model"
SUBJECTS = (*SHAPES, PAIR, REAL)
PROBLEMS_PER_ROUND = 24
BATCHES = (1, 8, 32)
ANSWER_TOKENS = 128
FOLDER = Path("docs/results")
PEERS_PYTHON, VLLM_PYTHON = Path(".venv-peers/bin/python"), Path(".venv-vllm/bin/python")


class Bench:
    """One run.

    Args:
        dtype: of weights and arithmetic, on every side.
        threads: CPU threads of a forward, on every side.
        rounds: that count.
        peers_python: interpreter of the peers' environment.
        vllm_python: interpreter of vLLM's.
    """

    def __init__(
        self, dtype: str, threads: int, rounds: int, peers_python: Path, vllm_python: Path = VLLM_PYTHON
    ) -> None:
        self.dtype = dtype
        self.threads = threads
        self.rounds = rounds
        self._pythons = {"own": Path(sys.executable), "peers": peers_python.absolute(), "vllm": vllm_python.absolute()}
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

    async def measure_random(self, shape: str, folder: Path) -> None:
        """Measure a model of random weights, which is kept in a folder."""
        await self._measure(shape, random_model_work(), random_checkpoint(shape, folder))

    async def measure_pair(self, pair: Pair) -> None:
        """Measure speculation with a pair, one prompt at a time."""
        large, small = pair.folder("large"), pair.folder("small")
        count = (self.rounds + 1) * PROBLEMS_PER_ROUND
        prompts = _problems(large, count) if pair.name == DEMO else real_prompts(large, count, "one at a time")
        await self._measure(pair.title, pair_work(prompts, PROBLEMS_PER_ROUND), large, small)

    async def measure_real(self, batches: tuple[int, ...] = BATCHES, tokens: int = ANSWER_TOKENS) -> None:
        """Measure the model that `make real` fetches, on real prompts."""
        large = real_model.model_folder()
        per_round = {batch: max(batch, 8) for batch in batches}
        prompts = {
            batch: real_prompts(large, (self.rounds + 1) * each, f"batch {batch}") for batch, each in per_round.items()
        }
        work = real_text_work(prompts, per_round, tokens)
        await self._measure(real_model.TITLE, work, large, gguf=real_model.gguf_file())

    async def _measure(
        self,
        subject: str,
        work: dict[Workload, tuple[str, ...]],
        large: Path,
        small: Path | None = None,
        gguf: Path | None = None,
    ) -> None:
        """Measure all workloads of a subject, whose engines are loaded once."""
        with ExitStack() as stack:
            engines, failures = self._load(work, Subject(large, small, gguf), stack)
            for workload, names in work.items():
                note(f"{subject}: {workload.name}")
                able = {name: engines[name] for name in names if name in engines}
                outcome = await turns.measure(workload, able, names[0], self.rounds)
                outcome.failures.update({name: failures[name] for name in names if name in failures})
                self.comparison.subjects.setdefault(subject, []).append(outcome)

    def _load(
        self, work: dict[Workload, tuple[str, ...]], subject: Subject, stack: ExitStack
    ) -> tuple[dict[str, RemotePeer], dict[str, str]]:
        engines: dict[str, RemotePeer] = {}
        failures: dict[str, str] = {}
        wanted = {name for names in work.values() for name in names}
        for name, side in SIDES.items():
            if name not in wanted or name not in self.comparison.versions:
                continue
            peer = stack.enter_context(RemotePeer(_module(side), self._pythons[side.environment], self.threads))
            draft = str(subject.small) if side.draft else None
            gguf = str(subject.gguf) if side.packed else None
            try:
                dtype = side.dtype or self.dtype
                peer.setup(Setup(str(subject.large), dtype, self.threads, draft, gguf, side.weights))
                engines[name] = peer
            except PeerError as error:
                failures[name] = f"loading: {error}"
        return engines, failures


def _module(side: Side) -> str:
    return f"benchmarks.peers.{side.module}"


@dataclass(frozen=True, slots=True)
class Subject:
    """Checkpoints under measurement: the model, one that drafts for it, and its GGUF file, where there are any."""

    large: Path
    small: Path | None = None
    gguf: Path | None = None


def real_prompts(folder: Path, count: int, variant: str) -> list[list[int]]:
    """Prompts that people write, as a checkpoint's chat template writes them; no two begin alike.

    Args:
        folder: of the checkpoint.
        count: prompts.
        variant: other ones begin otherwise, so that no cache knows them.
    """
    from pool.text import TextTokenizer
    from turnout.calls import ChatMessage

    tokenizer = TextTokenizer(folder)
    texts = [text for each in zip(*map(real_text.prompts, real_text.KINDS), strict=True) for text in each]
    return [
        tokenizer.encode_chat(
            [
                ChatMessage("system", f"Conversation {number}, {variant}. You are a helpful assistant."),
                ChatMessage("user", texts[number % len(texts)]),
            ]
        )
        for number in range(count)
    ]


def _problems(folder: Path, count: int) -> list[list[int]]:
    """Held-out arithmetic, as the demo's chat template writes it."""
    from pool.text import TextTokenizer
    from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
    from turnout.calls import ChatMessage

    tokenizer = TextTokenizer(folder)
    problems = heldout(MIDDLE_DIFFICULTY, count)
    return [tokenizer.encode_chat([ChatMessage("user", problem.prompt)]) for problem in problems]


def engines_of(subject: str) -> set[str]:
    """Names of the engines that a subject is measured on."""
    if subject == REAL:
        return set(REAL_TEXT)
    work = pair_work([[0]], 1) if subject == PAIR else random_model_work()
    return {name for names in work.values() for name in names}


async def measure(options: argparse.Namespace) -> Report:
    """Measure all subjects; the page is saved after each of them."""
    bench = Bench(options.dtype, options.threads, options.rounds, options.peers_python, options.vllm_python)
    used = {name for subject in options.subjects for name in engines_of(subject)}
    bench.find_peers([name for name in SIDES if name in options.engines and name in used])
    with tempfile.TemporaryDirectory(prefix="turnout-peers-") as temporary:
        for subject in options.subjects:
            if subject == PAIR:
                await bench.measure_pair(open_pair(options.pair))
            elif subject == REAL:
                await bench.measure_real()
            else:
                await bench.measure_random(subject, (options.checkpoints or Path(temporary)).absolute())
            if options.out is not None:
                page(bench.comparison).save(options.out)
    return page(bench.comparison)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, page_of(FOLDER, machine.instruction_set()), takes_pair=True)
    made.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=[*SHAPES, PAIR])
    made.add_argument("--engines", nargs="+", choices=sorted(SIDES), default=list(SIDES))
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--peers-python", type=Path, default=PEERS_PYTHON)
    made.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON)
    made.add_argument("--checkpoints", type=Path, help="where to keep the random models; absent: a temporary folder")
    return made


def main() -> None:
    """Measure; a page that is saved comes with the one of all machines next to it."""
    run(parser(), measure)
    if together := overview(FOLDER):
        (FOLDER / f"{STEM}.md").write_text(together, encoding="utf-8")


if __name__ == "__main__":
    main()
