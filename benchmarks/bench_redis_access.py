"""How fast values come from the store's server into memory and go there: our access path and redis-py, in one run.

Both sides move the same values between the same server and the same preallocated tensor, taking turns; each round
gives one ratio. redis-py parses with hiredis, its C parser, which is several times faster than its Python one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from redis.connection import PythonRespSerializer

from benchmarks.harness import note, publish
from experiments.machine import describe, one_line
from experiments.statistics import Interval, spread
from kvstore.redis.embedded import EmbeddedServer
from kvstore.redis.executables import find_server, read_version
from kvstore.redis.nodes import Address, Opener, parse_url
from kvstore.redis.redis_store import RedisStore

SIZES = (64 << 10, 256 << 10, 1 << 20)
LIFE_MS = 600_000
MGET_BYTES = 16 << 20
PROBED = 128
GOAL_RATE, GOAL_RATIO = 1.5, 3.0
RESULT = Path("docs/results/redis_access.md")
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
        opener, endpoint = Opener(address.access), address.endpoints[0]
        self.client: Any = opener.client(endpoint, 60.0)
        # hiredis copies a value to pack it; redis-py's own packer sends a large one as it is.
        self.packs_in_python: Any = opener.client(endpoint, 60.0)
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


def compare(rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> list[tuple[float, float]]:
    """Seconds of both, taking turns; a first round is thrown away."""
    return [(ours(), theirs()) for _ in range(rounds + 1)][1:]


def row(task: str, pairs: Sequence[tuple[float, float]], measure: Callable[[float], float]) -> Row:
    """What rounds come to; the ratio is how many times faster ours was."""
    return Row(
        task,
        spread([measure(mine) for mine, _ in pairs]),
        spread([measure(yours) for _, yours in pairs]),
        spread([yours / mine for mine, yours in pairs]),
    )


def measure_moves(bench: Bench, rounds: int, where: str) -> list[Row]:
    """Reads and writes at each size, in GB/s."""
    rows = []
    for size in SIZES:
        bench.fill(size)
        kib = size >> 10

        def rate(seconds: float) -> float:
            return bench.total / seconds / 1e9

        def clear(size: int = size) -> None:
            bench.clear_written(size)

        for name, theirs in {"MGET": bench.read_theirs, "GET": bench.read_singly}.items():
            reads = compare(
                rounds,
                lambda size=size: timed(lambda: bench.read_ours(size)),  # type: ignore[misc]
                lambda size=size, theirs=theirs: timed(lambda: theirs(size)),  # type: ignore[misc]
            )
            rows.append(row(f"{where}: read {kib} KiB values, GB/s (redis-py: {name})", reads, rate))
        for name, client in {"hiredis": bench.client, "Python": bench.packs_in_python}.items():
            writes = compare(
                rounds,
                lambda size=size: timed(lambda: bench.write_ours(size), clear),  # type: ignore[misc]
                lambda size=size, client=client: timed(lambda: bench.write_theirs(size, client), clear),  # type: ignore[misc]
            )
            clear()
            rows.append(row(f"{where}: write {kib} KiB values, GB/s (redis-py: SET packed by {name})", writes, rate))
    return rows


def measure_probes(bench: Bench, rounds: int, where: str, repeats: int = 50) -> list[Row]:
    """How long it takes to learn how many of 128 keys are there, in ms; the last 28 lie behind a gap."""
    keys = bench.keys(SIZES[0])[:PROBED]
    keys[PROBED - 28] = b"to1:bench:nobody"
    many = range(repeats)

    def ours() -> None:
        for _ in many:
            _expect(bench.store.count_prefix(keys, time.monotonic() + 60))

    def script() -> None:
        for _ in many:
            _expect(bench.store.script(LONGEST_PREFIX, keys, [], time.monotonic() + 60))

    def pipelined() -> None:
        for _ in many:
            pipe = bench.client.pipeline(transaction=False)
            for key in keys:
                pipe.exists(key)
            _expect(pipe.execute().index(0))

    def at_once() -> None:
        for _ in many:
            bench.client.exists(*keys)

    others = {
        "a script through our connection": script,
        "redis-py: EXISTS pipelined": pipelined,
        "redis-py: one EXISTS, which counts behind gaps": at_once,
    }
    return [
        row(
            f"{where}: probe {PROBED} keys, ms ({name})",
            compare(rounds, lambda: timed(ours), lambda other=other: timed(other)),  # type: ignore[misc]
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


def to_markdown(rows: Sequence[Row], machine: dict[str, str], rounds: int, total: int) -> str:
    """The table, with how it was obtained and whether the goals are met."""
    lines = [
        "# Access to the store's server",
        "",
        f"`python -m benchmarks.bench_redis_access`; {one_line(machine)}; {read_version(find_server())} on the same"
        f" machine; {total >> 20} MiB a timing, median of {rounds} alternating rounds [smallest, largest], one"
        f" connection and one thread each; {redis_py()}. Ratio: how many times faster ours was.",
        "",
        "| task | ours | other | ratio |",
        "| --- | --- | --- | --- |",
        *(f"| {each.task} | {each.ours} | {each.theirs} | {each.ratio} |" for each in rows),
        "",
    ]
    for each in rows:
        if each.task == f"TCP: read {SIZES[-1] >> 10} KiB values, GB/s (redis-py: MGET)":
            rate = "yes" if each.ours.value >= GOAL_RATE else "no"
            ratio = "yes" if each.ratio.value >= GOAL_RATIO else "no"
            lines.append(
                f"Goals at 1 MiB over TCP: at least {GOAL_RATE} GB/s: {rate};"
                f" at least {GOAL_RATIO:g} times MGET: {ratio}."
            )
    return "\n".join([*lines, ""])


def measure_all(rounds: int, total: int, port: int) -> list[Row]:
    """Every row, over TCP and over the unix socket, against an embedded server of its own."""
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="turnout-") as folder,
        EmbeddedServer(Path(folder), 4 * total + (64 << 20), port=port, admin=True) as server,
    ):
        socket = parse_url(str(server.admin_url))
        for where, address in (("TCP", replace(parse_url(server.url), access=socket.access)), ("unix socket", socket)):
            note(f"measuring over {where}")
            bench = Bench(address, total)
            rows += measure_moves(bench, rounds, where)
            bench.fill(SIZES[0])
            rows += measure_probes(bench, rounds, where)
            bench.close()
    return rows


def main(rounds: int, total: int, port: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    redis_py()  # before anything is measured
    machine = describe()
    text = to_markdown(measure_all(rounds, total, port), machine, rounds, total)
    publish(text, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=96, help="moved in one timing")
    parser.add_argument("--port", type=int, default=26380, help="for the server, on 127.0.0.1")
    parser.add_argument("--quick", action="store_true", help="two rounds of 16 MiB, results printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    if chosen.quick:
        main(2, 16 << 20, chosen.port, chosen.out)
    else:
        main(chosen.rounds, chosen.mib << 20, chosen.port, chosen.out or RESULT)
