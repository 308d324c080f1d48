"""Many requests at the same moment with one long prefix that is cached nowhere, at two engines in two processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Side, blocking, note, take_turns
from experiments.stats.intervals import Interval, spread

ROOT = Path(__file__).resolve().parent.parent.parent
WORKERS = 2
SUFFIX_TOKENS = 8
ADMISSIONS = (None, "second", "always")
LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Stampede:
    """Work of all requests together, with one setting of `kvstore.admission`.

    Attributes:
        admission: "" without a store.
        computed: prompt tokens that were computed, over the prefix's length.
        fetched: prompt tokens that came from the store, likewise.
        seconds: until the last request had its first token.
    """

    admission: str
    computed: Interval
    fetched: Interval
    seconds: Interval


class Worker:
    """An engine in a process of its own.

    Args:
        checkpoint: of its model.
        key: file with the root key.
    """

    def __init__(self, checkpoint: Path, key: Path) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the worker runs)
        # The environment is set for the worker alone: OpenMP reads it before any Python runs.
        module = "benchmarks.prefix_store.worker"
        self._process = subprocess.Popen(
            ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", module, str(checkpoint), str(key)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )

    def tell(self, **order: Any) -> None:
        """Give it something to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """What became of the oldest order.

        Raises:
            RuntimeError: the worker has ended, or does not answer.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LIMIT_S)[0]:
            raise RuntimeError(f"a worker did not answer in {LIMIT_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"a worker ended: {self._errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


def measure(
    checkpoint: Path, key: Path, url: str, vocab: int, prefix: int, requests: int, rounds: int, seed: int = 2
) -> list[Stampede]:
    """Measure without a store and with it; every stampede has a prefix of its own. Blocks.

    Args:
        checkpoint: of the model that both engines load.
        key: file with the root key.
        url: of a Redis.
        vocab: size of the vocabulary.
        prefix: tokens that the requests have in common.
        requests: at once, shared equally by the engines.
        rounds: that count.
        seed: of the tokens.
    """
    draw = random.Random(seed)

    def side(admission: str | None) -> Side[list[dict[str, Any]]]:
        return Side(
            admission or "",
            blocking(lambda: _stampede(workers, url, admission, _prompts(draw, vocab, prefix, requests))),
        )

    with ExitStack() as stack:
        workers = [Worker(checkpoint, key) for _ in range(WORKERS)]
        for worker in workers:
            stack.callback(worker.close)
        note("stampede: waiting for the engines")
        for worker in workers:
            worker.hear()
        turns = asyncio.run(take_turns([side(admission) for admission in ADMISSIONS], rounds))
    return [summary(name, answers, prefix) for name, answers in turns.readings.items()]


def _prompts(draw: random.Random, vocab: int, prefix: int, requests: int) -> list[list[int]]:
    common = [draw.randrange(4, vocab) for _ in range(prefix)]
    return [common + [draw.randrange(4, vocab) for _ in range(SUFFIX_TOKENS)] for _ in range(requests)]


def _stampede(workers: list[Worker], url: str, admission: str | None, prompts: list[list[int]]) -> list[dict[str, Any]]:
    for worker in workers:
        worker.tell(url=url, admission=admission)
    for worker in workers:
        worker.hear()
    for place, worker in enumerate(workers):
        worker.tell(prompts=prompts[place :: len(workers)])
    return [worker.hear() for worker in workers]


def summary(admission: str, rounds: list[list[dict[str, Any]]], prefix: int) -> Stampede:
    """What the workers' answers of each round come to."""
    return Stampede(
        admission,
        spread([sum(each["computed"] for each in answers) / prefix for answers in rounds]),
        spread([sum(each["fetched"] for each in answers) / prefix for answers in rounds]),
        spread([max(each["seconds"] for each in answers) for answers in rounds]),
    )
