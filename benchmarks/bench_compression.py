"""Text compressed by the real model against zlib and lzma, and decompressed while other requests are answered.

The texts are this repository's own, which the model was not trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import lzma
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, command_line, run
from experiments import real_model
from pool.local_pool import LocalPool
from turnout.calls import GenerateCall
from turnout.embed_calls import TaskCall
from turnout.types import SamplingParams

TEXTS = {
    "documentation": Path("docs/tenants.md"),
    "Python": Path("pool/pool.py"),
    "JSON": Path("docs/results/host.json"),
}
OTHERS, OTHER_TOKENS = 4, 24


@dataclass(frozen=True, slots=True)
class Row:
    """One text: bits per character by each compressor; `found` is what the task said of it."""

    text: str
    characters: int
    found: dict[str, Any]
    zlib_bits: float
    lzma_bits: float
    same: bool

    @property
    def container_bits(self) -> float:
        """Bits per character of all that is kept: the code, and what a decoder must know."""
        return 8.0 * int(self.found["compressed_bytes"]) / self.characters


def beginning(path: Path, size: int) -> str:
    """The first bytes of a text, in whole characters."""
    return path.read_bytes()[:size].decode(errors="ignore")


async def measure(options: argparse.Namespace) -> Report:
    """Compress each text alone, and decompress it among other requests."""
    texts = {name: beginning(path, options.bytes) for name, path in TEXTS.items()}
    pool = LocalPool.load(real_model.POOL, real_model.alone(options.dtype))
    rows = [await _measured(pool, name, text, options) for name, text in texts.items()]
    await pool.close()
    report = Report(
        f"Text compressed by {real_model.TITLE} ({options.dtype})",
        f"`python -m benchmarks.bench_compression`; the first {options.bytes} bytes of each text; windows of"
        f" {options.window} tokens, of which {options.overlap} are read again. zlib at level 9, lzma at preset"
        " 9 extreme. In bits per character; the container is what `compress` returns, the code the part that the model"
        " decides.",
    )
    columns: dict[str, Any] = {
        "text": lambda row: row.text,
        "characters": lambda row: row.characters,
        "tokens": lambda row: row.found["tokens"],
        "code": lambda row: f"{row.found['bits_per_character']:.3f}",
        "bound by the model": lambda row: f"{row.found['model_bits'] / row.characters:.3f}",
        "container": lambda row: f"{row.container_bits:.3f}",
        "zlib": lambda row: f"{row.zlib_bits:.3f}",
        "lzma": lambda row: f"{row.lzma_bits:.3f}",
        "restored among other requests": lambda row: "yes" if row.same else "NO",
    }
    report.table("texts", rows, columns)
    return report


async def _measured(pool: LocalPool, name: str, text: str, options: argparse.Namespace) -> Row:
    shape = {"window": options.window, "overlap": options.overlap}
    made = await pool.task(TaskCall("r", pool.name, "compress", {"text": text, **shape}))
    others = asyncio.create_task(_others(pool))
    back = await pool.task(TaskCall("r", pool.name, "decompress", {"data": made.result["data"]}))
    await others
    data, count = text.encode(), len(text)
    zipped, xz = zlib.compress(data, 9), lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    same = back.result["text"] == text
    found = {key: value for key, value in made.result.items() if key != "data"}
    return Row(name, count, found, 8 * len(zipped) / count, 8 * len(xz) / count, same)


async def _others(pool: LocalPool) -> None:
    async def one(number: int) -> None:
        sampling = SamplingParams(max_tokens=OTHER_TOKENS, seed=number)
        async for _ in pool.generate(GenerateCall(f"o{number}", pool.name, sampling, prompt="Once upon a time")):
            pass

    await asyncio.gather(*map(one, range(OTHERS)))


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/compression.md"), rounds=1, bytes=256)
    parser.add_argument("--bytes", type=int, default=4096, help="of each text")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--overlap", type=int, default=128, help="tokens")
    parser.add_argument("--dtype", default="bfloat16", help="of the model's weights")
    run(parser, measure)
