"""What the shared prefix store gains and costs: `python -m benchmarks.prefix_store.bench`.

One engine, one Redis, one run: each measurement takes turns between the store and what it is compared with, and each
round gives one ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.harness import note, publish
from benchmarks.peers.checkpoints import SHAPES, random_checkpoint
from benchmarks.prefix_store import decisions, first_token, outage, stampede, write_behind
from benchmarks.prefix_store.page import Results, Run, to_markdown
from benchmarks.prefix_store.workbench import Workbench
from experiments.machine import describe
from kvstore.encodings import Encodings
from kvstore.keys import Keyring, write_root_key
from kvstore.redis.embedded import EmbeddedServer
from turnout.free_ports import free_port

RESULT = Path("docs/results/kvstore")
REDIS_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        prefix: tokens.
        rounds: of what takes turns.
        codecs: lossy ones.
        prompts: read beside decoding, in one measurement.
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


async def measure(checkpoint: Path, model: str, folder: Path, size: Size) -> Results:
    """Everything, one part after the other.

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
            run = Run(machine, model, size.prefix, size.rounds, size.requests, forms.chunk_tokens, forms.raw_bytes)
        finally:
            await bench.close()
    return Results(run, first, behind, crowd, away, choices)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="35 M parameters, few rounds, printed and not saved")
    parser.add_argument("--model", choices=sorted(SHAPES), help="absent: 220 M, 35 M with --quick")
    parser.add_argument("--out", type=Path, help=f"without its ending; absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    model = chosen.model or ("35 M" if chosen.quick else "220 M")
    with tempfile.TemporaryDirectory(prefix="turnout-kv-") as folder:
        checkpoint = random_checkpoint(model, Path(folder))
        results = uvloop.run(measure(checkpoint, model, Path(folder), QUICK if chosen.quick else Size()))
    text = to_markdown(results)
    out = chosen.out if chosen.quick else chosen.out or RESULT
    publish(text, out, asdict(results))


if __name__ == "__main__":
    main()
