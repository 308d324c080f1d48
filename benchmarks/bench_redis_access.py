"""Throughput of values from and to the store's server: our access path and redis-py, in one run.

Both sides move the same values between the same server and the same preallocated tensor, taking turns; each round
gives one ratio. redis-py parses with hiredis, its C parser, which is several times faster than its Python one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from redis.connection import PythonRespSerializer

from benchmarks.harness import Goal, Report, Side, blocking, command_line, note, run, take_turns
from experiments.stats.intervals import Interval
from kvstore.redis.embedded import EmbeddedServer
from kvstore.redis.executables import find_server, read_version
from kvstore.redis.nodes import Address, Connector, parse_url
from kvstore.redis.redis_store import RedisStore

SIZES = (64 << 10, 256 << 10, 1 << 20)
LIFE_MS = 600_000
MGET_BYTES = 16 << 20
PROBED = 128
GOAL_RATE, GOAL_RATIO = Goal(1.5), Goal(3.0)
JUDGED = f"TCP: read {SIZES[-1] >> 10} KiB values, GB/s (redis-py: MGET)"
LONGEST_PREFIX = (
    "for i, key in ipairs(KEYS) do if redis.call('EXISTS', key) == 0 then return i - 1 end end return #KEYS"
)


@dataclass(frozen=True, slots=True)
class Row:
    """Two ways of doing the same: of each the rate (GB/s) or time (ms), and ours against theirs round by round."""

    task: str
    ours: Interval
    theirs: Interval
    ratio: Interval


class Bench:
    """A server with values in it, and both ways to them.

    Args:
        address: of the server, with all rights.
        total: bytes moved in one timing.
    """

    def __init__(self, address: Address, total: int) -> None:
        self.store = RedisStore(address, connections=1)
        connector, endpoint = Connector(address.access), address.endpoints[0]
        self.client: Any = connector.client(endpoint, 60.0)
        # hiredis copies a value to pack it; redis-py's own packer sends a large one as it is.
        self.packs_in_python: Any = connector.client(endpoint, 60.0)
        options = self.packs_in_python.connection_pool.connection_kwargs
        options["command_packer"] = PythonRespSerializer(6000, self.client.get_encoder().encode)
        self.total = total
        self.memory = torch.zeros(total, dtype=torch.uint8)
        self.view = memoryview(self.memory.numpy().data).cast("B")

    def close(self) -> None:
        """Close both."""
        self.store.close()
        self.client.close()
        self.packs_in_python.close()

    def keys(self, size: int) -> list[bytes]:
        """Names of the values of one size."""
        return [b"to1:bench:%d:%d" % (size, i) for i in range(self.total // size)]

    def fill(self, size: int) -> None:
        """Set the values of one size, and no others."""
        self.client.flushall()
        values = torch.randint(0, 256, (self.total,), dtype=torch.uint8).numpy().tobytes()
        for i, key in enumerate(self.keys(size)):
            self.client.set(key, values[i * size : (i + 1) * size], px=LIFE_MS)

    def read_ours(self, size: int) -> None:
        """All values through the store."""
        keys = self.keys(size)
        count = self.store.read(
            keys,
            lambda index, length: self.view[index * size : index * size + length],
            lambda _: True,
            LIFE_MS,
            time.monotonic() + 60,
        )
        if count != len(keys):
            raise RuntimeError(f"{count} of {len(keys)} values were there")

    def read_singly(self, size: int) -> None:
        """Read all values by GET, one at a time, and copy them to where they belong."""
        for i, key in enumerate(self.keys(size)):
            self.view[i * size : (i + 1) * size] = self.client.get(key)

    def read_theirs(self, size: int) -> None:
        """Read all values by MGET, some megabytes at a time, and copy them to where they belong."""
        keys = self.keys(size)
        step = MGET_BYTES // size
        for start in range(0, len(keys), step):
            for i, value in enumerate(self.client.mget(keys[start : start + step]), start):
                self.view[i * size : (i + 1) * size] = value

    def write_ours(self, size: int) -> None:
        """Set all values anew."""
        for i, key in enumerate(self.keys(size)):
            part = self.view[i * size : (i + 1) * size]
            self.store.write(b"w" + key, [part[:96], part[96:]], LIFE_MS, time.monotonic() + 60)

    def write_theirs(self, size: int, client: Any) -> None:
        """Do the same with redis-py, where joining header and payload is a copy."""
        for i, key in enumerate(self.keys(size)):
            part = self.view[i * size : (i + 1) * size]
            client.set(b"w" + key, b"".join([part[:96], part[96:]]), px=LIFE_MS, nx=True)

    def clear_written(self, size: int) -> None:
        """Remove what the writes set."""
        self.client.unlink(*[b"w" + key for key in self.keys(size)])


def timed(work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
    """Seconds of one run."""
    if before is not None:
        before()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def compare(
    task: str, rounds: int, ours: Callable[[], float], theirs: Callable[[], float], figure: Callable[[float], float]
) -> Row:
    """Both ways in turn; `figure` makes the number that is shown of their seconds."""
    turns = await take_turns([Side("ours", blocking(ours)), Side("theirs", blocking(theirs))], rounds)
    return Row(task, turns.spread("ours", figure), turns.spread("theirs", figure), turns.ratio("theirs", "ours"))


async def measure_moves(bench: Bench, rounds: int, where: str) -> list[Row]:
    """Reads and writes at each size, in GB/s."""
    rows = []

    def rate(seconds: float) -> float:
        return bench.total / seconds / 1e9

    for size in SIZES:
        bench.fill(size)
        clear = partial(bench.clear_written, size)
        ours = partial(timed, partial(bench.read_ours, size))
        for name, read in {"MGET": bench.read_theirs, "GET": bench.read_singly}.items():
            task = f"{where}: read {size >> 10} KiB values, GB/s (redis-py: {name})"
            rows.append(await compare(task, rounds, ours, partial(timed, partial(read, size)), rate))
        ours = partial(timed, partial(bench.write_ours, size), clear)
        for name, client in {"hiredis": bench.client, "Python": bench.packs_in_python}.items():
            task = f"{where}: write {size >> 10} KiB values, GB/s (redis-py: SET packed by {name})"
            theirs = partial(timed, partial(bench.write_theirs, size, client), clear)
            rows.append(await compare(task, rounds, ours, theirs, rate))
            clear()
    return rows


async def measure_probes(bench: Bench, rounds: int, where: str, repeats: int = 50) -> list[Row]:
    """How long it takes to learn how many of 128 keys are there, in ms; the last 28 lie behind a gap."""
    keys = bench.keys(SIZES[0])[:PROBED]
    keys[PROBED - 28] = b"to1:bench:absent"

    def ours() -> None:
        _expect(bench.store.count_prefix(keys, time.monotonic() + 60))

    def script() -> None:
        _expect(bench.store.script(LONGEST_PREFIX, keys, [], time.monotonic() + 60))

    def pipelined() -> None:
        pipe = bench.client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(key)
        _expect(pipe.execute().index(0))

    def at_once() -> None:
        bench.client.exists(*keys)

    def many(probe: Callable[[], None]) -> Callable[[], float]:
        def repeated() -> None:
            for _ in range(repeats):
                probe()

        return partial(timed, repeated)

    others = {
        "a script through our connection": script,
        "redis-py: EXISTS pipelined": pipelined,
        "redis-py: one EXISTS, which counts behind gaps": at_once,
    }
    return [
        await compare(
            f"{where}: probe {PROBED} keys, ms ({name})",
            rounds,
            many(ours),
            many(other),
            lambda seconds: seconds / repeats * 1e3,
        )
        for name, other in others.items()
    ]


def _expect(count: int) -> None:
    if count != PROBED - 28:
        raise RuntimeError(f"a probe counted {count}")


def redis_py() -> str:
    """Say what redis-py is, with its parser in C.

    Raises:
        RuntimeError: hiredis is not installed, and redis-py would parse in Python.
    """
    try:
        return f"redis-py {version('redis')} with hiredis {version('hiredis')}"
    except PackageNotFoundError:
        raise RuntimeError(
            "hiredis is not installed; redis-py without it is not what anybody should be compared with"
        ) from None


async def measure(options: argparse.Namespace) -> Report:
    """Every row, over TCP and over the unix socket, against an embedded server of its own."""
    total = options.mib << 20
    report = Report(
        "Access to the store's server",
        f"`python -m benchmarks.bench_redis_access`; {read_version(find_server())} on the same machine; {options.mib}"
        f" MiB a timing, median of {options.rounds} alternating rounds [smallest, largest], one connection and one"
        f" thread each; {redis_py()}. Ratio: how many times faster ours was.",
    )
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="turnout-") as folder,
        EmbeddedServer(Path(folder), 4 * total + (64 << 20), port=options.port, admin=True) as server,
    ):
        socket = parse_url(str(server.admin_url))
        for where, address in (("TCP", replace(parse_url(server.url), access=socket.access)), ("unix socket", socket)):
            note(f"measuring over {where}")
            bench = Bench(address, total)
            rows += await measure_moves(bench, options.rounds, where)
            bench.fill(SIZES[0])
            rows += await measure_probes(bench, options.rounds, where)
            bench.close()
    columns = {
        "task": lambda row: row.task,
        "ours": lambda row: row.ours,
        "other": lambda row: row.theirs,
        "ratio": lambda row: row.ratio,
    }
    report.table("rows", rows, columns)
    judged = next(row for row in rows if row.task == JUDGED)
    report.text(
        f"Goals at 1 MiB over TCP: at least {GOAL_RATE.value:g} GB/s: {GOAL_RATE.met(judged.ours)}; at least"
        f" {GOAL_RATIO.value:g} times MGET: {GOAL_RATIO.met(judged.ratio)}."
    )
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/redis_access.md"), rounds=7, mib=16)
    parser.add_argument("--mib", type=int, default=96, help="moved in one timing")
    parser.add_argument("--port", type=int, default=26380, help="for the server, on 127.0.0.1")
    run(parser, measure)
