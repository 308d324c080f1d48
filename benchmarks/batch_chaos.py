"""A job of many short prompts on a cluster of two nodes, whose driver, actors and nodes are killed at random.

What must hold: every line is answered once, nothing is lost, little is done twice, memory does not grow, and between
the kills the job is nearly as fast as the engine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from ray._raylet import Config as RayNativeConfig  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster

from benchmarks.batch_outcome import Alone, Kill, Outcome, Sample, page
from benchmarks.harness import Report, command_line, note, run
from experiments.machine import describe
from experiments.pairs import Pair, open_pair
from experiments.process_memory import proportional_bytes, tree

STORE_BYTES = 80 << 20
LOOK_S = 0.5
MEMORY_S = 10.0  # between looks at the memory, each of which walks the page tables of all processes
MAX_TOKENS = 48  # more than nearly all of these answers have
BLOCK_ROWS = 256
CONCURRENCY = 64
ENGINE_ROWS = 2000  # lines by which the engine alone is measured, before the job and after it
NODE_TRIES = 3
ACTOR = b"ray::MapWorker(MapBatches(Answerer"
PARTS = ("actor", "driver", "node")
STALL_S = 600.0  # without a line more: the job hangs
SETTING = (
    f"`make batch-chaos`: short prompts on the {{}}, {CONCURRENCY} at once, blocks of {BLOCK_ROWS}, whole answers"
    f" (at most {MAX_TOKENS} tokens), on a cluster of two nodes of one machine, of which the second does the work;"
    " {} copies of the pool, which share what the job has at once."
)


class Chaos:
    """A cluster of a head and one node more, and a driver on it.

    Args:
        folder: for the job's files.
        temp: for Ray's.
        rows: lines of the job.
        actors: copies of the pool.
        block_rows: lines of a block.
        concurrency: requests that a copy answers at once.
        config: of the pool; None: the demo pair.
    """

    def __init__(
        self,
        folder: Path,
        temp: Path,
        rows: int,
        actors: int = 1,
        block_rows: int = BLOCK_ROWS,
        concurrency: int = CONCURRENCY,
        config: Path | None = None,
    ) -> None:
        self.outcome = Outcome(rows, block_rows)
        self._folder = folder
        self._work = folder / "out.jsonl.work"
        self._command = (
            *(sys.executable, "-m", "cli.main", "batch", str(folder / "in.jsonl"), str(folder / "out.jsonl")),
            *("--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--block-rows", str(block_rows)),
            *("--concurrency", str(concurrency), "--actors", str(actors), "--json"),
            *(() if config is None else ("--config", str(config))),
        )
        node = {"num_cpus": 4 + actors, "object_store_memory": STORE_BYTES}
        self._node_args = node
        # Nothing but the driver runs on the head: what the other node holds is lost with it.
        head = {**node, "num_cpus": 0, "temp_dir": str(temp), "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._node = self._add_node()
        self._driver: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()
        self._memory_due = 0.0
        write_prompts(folder / "in.jsonl", rows)

    def _add_node(self) -> Any:
        """A node more. Ray gives one 30 seconds to come up, which a busy machine may need more than once."""
        for left in reversed(range(NODE_TRIES)):
            before = set(tree(os.getpid()))
            try:
                return self._cluster.add_node(**self._node_args)
            except Exception as error:  # Ray has no type of its own for it
                if not left:
                    raise
                note(f"a node did not come up: {error}")
                for pid in set(tree(os.getpid())) - before:
                    if _runs(pid, b"raylet"):
                        _kill(pid)
        raise AssertionError

    def close(self) -> None:
        """End everything that was started."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        self._cluster.shutdown()

    def run(self, kills: list[Kill]) -> Outcome:
        """Do the job and kill parts of it; each kill waits for a number of lines.

        Raises:
            TimeoutError: the job makes no way.
        """
        self.outcome.wanted = len(kills)
        self._started = time.monotonic()
        self._begin()
        left, last, moved = list(kills), 0, time.monotonic()
        while True:
            assert self._driver is not None
            status = self._driver.poll()
            if status is not None:
                if status == 0:
                    break
                note(f"the driver ended with status {status}; it is begun again")
                self._begin()
            done = self._look()
            if done > last:
                last, moved = done, time.monotonic()
            elif time.monotonic() > moved + STALL_S:
                raise TimeoutError(f"no line more for {STALL_S:g} s, after {done}")
            at = time.monotonic() - self._started
            hurt = self.outcome.kills[-1].after if self.outcome.kills else 0
            if left and done >= left[0].after and done > hurt and self._kill(left[0].part):
                self.outcome.kills.append(Kill(left.pop(0).part, done, at))
            time.sleep(LOOK_S)
        self.outcome.status = 0
        self.outcome.seconds = time.monotonic() - self._started
        self.outcome.summary = json.loads((self._folder / "summary.json").read_text())
        with (self._folder / "out.jsonl").open() as file:
            self.outcome.ids.update(json.loads(line)["custom_id"] for line in file)
        return self.outcome

    def _begin(self) -> None:
        command = [*self._command, "--cluster", str(self._cluster.address)]
        with (self._folder / "summary.json").open("wb") as out, (self._folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(command, stdout=out, stderr=log)

    def _look(self) -> int:
        done = sum(_num_lines(path) for name in ("done", "part") for path in _files(self._work / name))
        at, size = time.monotonic() - self._started, None
        if at >= self._memory_due:
            self._memory_due = at + MEMORY_S
            roots = [os.getpid(), *self._processes(), *([self._driver.pid] if self._driver is not None else [])]
            size = proportional_bytes(list(dict.fromkeys(pid for root in roots for pid in tree(root))))
        self.outcome.samples.append(Sample(at, done, size))
        return done

    def _processes(self, kind: str | None = None) -> list[int]:
        """What Ray runs on its nodes."""
        found = [each.all_processes for each in self._cluster.list_all_nodes()]
        return [
            info.process.pid for node in found for name, infos in node.items() for info in infos if kind in (None, name)
        ]

    def _kill(self, part: str) -> bool:
        """End a part; False where there is none just now."""
        assert self._driver is not None
        if part == "driver":
            self._driver.kill()
            self._driver.wait()
        elif part == "node":
            self._cluster.remove_node(self._node, allow_graceful=False)
            self._node = self._add_node()
        else:
            actors = [pid for root in self._processes("raylet") for pid in tree(root) if _runs(pid, ACTOR)]
            if not actors:
                return False
            _kill(random.choice(actors))
        note(f"killed: {part}, after {self.outcome.samples[-1].lines} lines")
        return True


def write_prompts(path: Path, rows: int) -> None:
    """Short problems, of which the first part is always the same."""
    drawn = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            text = f"What is {drawn.randint(1, 99)}*{drawn.randint(1, 99)}+{drawn.randint(1, 99)}?"
            file.write(json.dumps({"custom_id": f"id-{number}", "prompt": text}) + "\n")


def planned(rows: int, kills: int, seed: int) -> list[Kill]:
    """Kills at random places of a job, each part at least once where there are enough."""
    drawn = random.Random(seed)
    parts = [PARTS[place % len(PARTS)] for place in range(kills)]
    drawn.shuffle(parts)
    places = sorted(drawn.uniform(0.02, 0.9) * rows for _ in range(kills))
    return [Kill(part, int(place)) for part, place in zip(parts, places, strict=True)]


@contextmanager
def chaos(
    rows: int,
    actors: int = 1,
    block_rows: int = BLOCK_ROWS,
    concurrency: int = CONCURRENCY,
    config: Path | None = None,
) -> Iterator[Chaos]:
    """A job and its cluster, ended with the context; see `Chaos`."""
    folder = Path(tempfile.mkdtemp(prefix="turnout-batch-"))
    temp = Path(tempfile.mkdtemp(prefix="tb-", dir="/tmp"))  # short: Ray puts sockets into it
    try:
        with _environment(temp), closing(Chaos(folder, temp, rows, actors, block_rows, concurrency, config)) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(temp, ignore_errors=True)


@contextmanager
def _environment(temp: Path) -> Iterator[None]:
    """Environment of Ray's processes for as long as the context lasts, which hides this cluster from others."""
    # `Cluster` writes its address there, and would into a folder that all of a machine's Rays share.
    (temp / "ray").mkdir()
    environment = os.environ  # noqa: TID251 - Ray has no other way to set it
    wanted = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_TMPDIR": str(temp)}
    before = {name: environment.get(name) for name in wanted}
    environment.update(wanted)
    RayNativeConfig.initialize("")  # importing ray has read the mode already
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environment[name]
            else:
                environment[name] = value
        RayNativeConfig.initialize("")


def engine_rate(rows: int, config: Path | None = None, for_throughput: bool = False, copies: int = 1) -> float:
    """Lines a second of the engine alone, in processes of its own, with as many requests at once.

    Args:
        rows: lines of each process.
        config: of the pool, which is the first of it; None: the demo pair.
        for_throughput: with the settings of a job, and not those that the configuration has.
        copies: processes side by side, which share the requests and the cores.
    """
    at_once = CONCURRENCY // copies
    asked = f"{rows}, {MAX_TOKENS}, {at_once}, sys.argv[1], {for_throughput}, {copies}"
    source = (
        "import asyncio, sys; from benchmarks.batch_engine import rate;"
        f" sys.stdout.write(str(asyncio.run(rate({asked}))))"
    )
    command = [sys.executable, "-c", source, "" if config is None else str(config)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(copies)
    ]
    said = [each.communicate()[0] for each in running]
    for each in running:
        if each.returncode:
            raise subprocess.CalledProcessError(each.returncode, command)
    return sum(map(float, said))


def _files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.suffix != ".json" and not path.name.startswith(".")]
    return []


_COUNTED: dict[tuple[str, int], int] = {}


def _num_lines(path: Path) -> int:
    with suppress(OSError):
        key = (path.name, path.stat().st_size)
        if key not in _COUNTED:
            read: Callable[[Path], bytes] = Path.read_bytes
            _COUNTED[key] = read(path).count(b"\n")
        return _COUNTED[key]
    return 0


def _runs(pid: int, program: bytes) -> bool:
    """Whether a process runs a program, or calls itself so."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
        return name.startswith(program) or name.endswith(b"/" + program)
    return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def measure(options: argparse.Namespace) -> Report:
    """Run the job under kills, and the engine alone before it and after it."""
    pair = open_pair(options.pair)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pair.yaml"
        config.write_text(yaml.safe_dump(pair.config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        return _measure(options, pair, config)


def _measure(options: argparse.Namespace, pair: Pair, config: Path) -> Report:
    machine, rows, actors = describe(), options.rows, options.actors
    few = min(rows, ENGINE_ROWS)

    def engine() -> tuple[float, float, float]:
        alike, usual = (engine_rate(few, config, for_throughput=for_throughput) for for_throughput in (True, False))
        copies = engine_rate(few, config, for_throughput=True, copies=actors)
        note(f"the engine alone: {alike:.1f} lines a second, with its default settings {usual:.1f}")
        note(f"as many processes as the job has copies: {copies:.1f}")
        return alike, usual, copies

    before = engine()
    with chaos(rows, actors, concurrency=CONCURRENCY // actors, config=config) as made:
        outcome = made.run(planned(rows, options.kills, options.seed))
    after = engine()
    alone = Alone(*((one + other) / 2 for one, other in zip(before, after, strict=True)))
    return page(outcome, alone, SETTING.format(pair.title, actors), machine)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, Path("docs/results/batch.md"), rounds=None, takes_pair=True, rows=1000, kills=1)
    made.add_argument("--rows", type=int, default=100_000)
    made.add_argument("--kills", type=int, default=5)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--actors", type=int, default=2)
    return made


if __name__ == "__main__":
    run(parser(), measure)
