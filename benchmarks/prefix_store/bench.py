"""Gain and cost of the shared prefix store: `python -m benchmarks.prefix_store.bench`.

One engine, one Redis, one run: each measurement takes turns between the store and what it is compared with, and each
round gives one ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import Report, command_line, note, run
from benchmarks.peers.checkpoints import SHAPES, random_checkpoint
from benchmarks.prefix_store import decisions, first_token, outage, stampede, write_behind
from benchmarks.prefix_store.page import Results, Run, page
from benchmarks.prefix_store.workbench import Workbench
from experiments.machine import describe
from kvstore.encodings import Encodings
from kvstore.keys import Keyring, write_root_key
from kvstore.redis.embedded import EmbeddedServer
from turnout.free_ports import free_port

REDIS_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the measurement.

    Attributes:
        prefix: tokens.
        rounds: of what takes turns.
        codecs: lossy ones.
        prompts: read during decoding, in one measurement.
        tokens: decoded by each request where nothing is read.
        stampedes: rounds of these.
        requests: of a stampede.
        probes: first tokens with the breaker open, on each side.
        look_up_s: of look-ups with the breaker open.
        trials: decisions of each kind.
    """

    prefix: int = 2000
    rounds: int = 7
    codecs: tuple[str, ...] = ("fp8", "int8", "cachegen-1", "cachegen-2")
    prompts: int = 2
    tokens: int = 96
    stampedes: int = 3
    requests: int = 20
    probes: int = 200
    look_up_s: float = 6.0
    trials: int = 5


QUICK = Size(2000, 1, ("int8", "cachegen-2"), 1, 24, 1, 20, 20, 2.0, 1)


async def all_parts(checkpoint: Path, model: str, folder: Path, size: Size) -> Results:
    """Measure one part after the other.

    Args:
        checkpoint: of the model.
        model: what it is called.
        folder: for the server's files.
        size: how much.
    """
    machine = describe()
    root = write_root_key(folder / "root.key")
    with EmbeddedServer(folder / "redis", REDIS_BYTES, port=free_port()) as server:
        note("loading the model")
        bench = Workbench(checkpoint, folder / "root.key")
        try:
            first = await first_token.measure(
                bench, server.socket_url, server.url, size.codecs, size.prefix, size.rounds
            )
            behind = await write_behind.measure(
                bench, server.socket_url, size.prefix, size.prompts, size.tokens, size.rounds
            )
            crowd = await asyncio.to_thread(
                stampede.measure,
                checkpoint,
                folder / "root.key",
                server.socket_url,
                bench.engine.vocab_size,
                size.prefix,
                size.requests,
                size.stampedes,
            )
            away = await outage.measure(bench, size.prefix, size.probes, size.look_up_s)
            choices = await decisions.measure(
                server.socket_url, root, bench.layout, bench.seconds, size.prefix, size.trials
            )
            forms = Encodings(Keyring(root), bench.layout, ("raw",))
            setting = Run(machine, model, size.prefix, size.rounds, size.requests, forms.chunk_tokens, forms.raw_bytes)
        finally:
            await bench.close()
    return Results(setting, first, behind, crowd, away, choices)


async def measure(options: argparse.Namespace) -> Report:
    """Measure everything on a model of random weights."""
    size = QUICK if options.quick else Size()
    with tempfile.TemporaryDirectory(prefix="turnout-kv-") as folder:
        checkpoint = random_checkpoint(options.model, Path(folder))
        sized = replace(size, rounds=options.rounds)
        return page(await all_parts(checkpoint, options.model, Path(folder), sized))


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, Path("docs/results/kvstore.md"), rounds=7, model="35 M")
    made.add_argument("--model", choices=sorted(SHAPES), default="220 M", help="absent: 220 M, 35 M with --quick")
    return made


if __name__ == "__main__":
    run(parser(), measure)
