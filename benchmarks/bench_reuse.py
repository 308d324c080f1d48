"""Reuse of spans at other positions: time to the first token, and what it costs in quality (papers #222 and #230).

Quality on the large demo model over held-out Python, time on random weights of 220 M parameters: prompts made of pieces
of prompts seen before, in another order. Both ways take turns, and each round gives one ratio.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.engines import open_engine, random_220m
from benchmarks.harness import Comparison, Report, Side, command_line, compare, note, run
from benchmarks.reuse_quality import (
    OTHERS,
    READERS,
    Quality,
    build_cases,
    computed_exactly,
    edit_quality,
    large_model,
    reuse_quality,
    sequence,
)
from engine.device import Device
from engine.model import EngineModel
from engine.reuse.settings import ReuseSettings
from experiments.pairs import Pair, open_pair

SHARES = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
CORRECTIONS = (0, 2, 8)
VOCABULARY = 8192
PIECES, PIECE_TOKENS, OWN_TOKENS = 6, 256, 100


@dataclass(frozen=True, slots=True)
class Row:
    """One way to reuse, and what it gives."""

    name: str
    quality: Quality


async def first_token_s(model: EngineModel, tokens: list[int], lossy: bool) -> float:
    """From nothing to the row after a prompt; its blocks are dropped."""
    seq = sequence(tokens, READERS if lossy else OTHERS, lossy)
    started = time.perf_counter()
    await model.extend(seq)
    seconds = time.perf_counter() - started
    model.release(seq)
    return seconds


async def time_reuse(model: EngineModel, share: float, rounds: int, draw: random.Random) -> Comparison:
    """Prompts of pieces of a prompt seen before, shuffled, with and without reuse in turns."""
    model.reuse(ReuseSettings(recompute=share))
    prompt: list[int] = []

    async def before(_: int) -> None:
        model.pool.clear_cached()
        pieces = [[draw.randrange(2, VOCABULARY) for _ in range(PIECE_TOKENS)] for _ in range(PIECES)]
        await model.extend(seen := sequence([token for piece in pieces for token in piece], READERS))
        model.release(seen)
        draw.shuffle(pieces)
        own = [[draw.randrange(2, VOCABULARY) for _ in range(OWN_TOKENS)] for _ in range(2)]
        prompt[:] = [*own[0], *(token for piece in pieces for token in piece), *own[1]]

    reuse = Side("reuse", lambda _: first_token_s(model, prompt, lossy=True))
    full = Side("full prefill", lambda _: first_token_s(model, prompt, lossy=False))
    return await compare({"rho": share}, (reuse, full), rounds, before=before)


async def measure_quality(count: int, pair: Pair) -> list[Row]:
    """Every share, by deviation and by chance; corrections while decoding; edits."""
    device = Device("cpu")
    model, tokenizer = large_model(device, pair)
    cases = build_cases(tokenizer, count)
    exact = await computed_exactly(model, cases)
    rows = []
    for share in SHARES:
        for select in ("deviation", "random") if 0 < share < 1 else ("deviation",):
            settings = ReuseSettings(recompute=share, threshold=0.0, decode_tokens=0)
            settings = replace(settings, select="random") if select == "random" else settings
            note(f"share {share}, {select}")
            rows.append(Row(f"rho {share:g}, by {select}", await reuse_quality(model, cases, exact, settings)))
    for tokens in CORRECTIONS:
        note(f"{tokens} corrections a token")
        settings = ReuseSettings(decode_tokens=tokens)
        name = f"rho {settings.recompute:g}, {tokens} corrections a token"
        rows.append(Row(name, await reuse_quality(model, cases, exact, settings, decoding=True)))
    rows.append(Row("an edit, suffix moved", await edit_quality(model, cases)))
    rows.append(Row("an edit, suffix moved but not turned", await edit_quality(model, cases, turned=False)))
    await model.close()
    device.close()
    return rows


async def measure(options: argparse.Namespace) -> Report:
    """Quality of every share, and times of those that are worth it."""
    pair = open_pair(options.pair)
    report = Report("Reuse of spans at other positions", "`python -m benchmarks.bench_reuse`.")
    report.text(
        f"Quality: large model of the {pair.title}, float32, {options.cases} prompts of three pieces of 96 tokens"
        " from prompts seen before, in another order, with 48 tokens of their own; the next 25 distributions against"
        " those of a full prefill. Computed: of the prompt's tokens, weighted by layers."
    )
    quality = {
        "": lambda row: row.name,
        "KL, nats": lambda row: f"{row.quality.nats:.4f}",
        "same arg-max": lambda row: f"{row.quality.agreement:.1%}",
        "computed": lambda row: f"{row.quality.computed:.1%}",
    }
    report.table("quality", await measure_quality(options.cases, pair), quality)
    draw = random.Random(0)
    async with open_engine(random_220m().to(torch.bfloat16)) as [model]:
        timings = [await time_reuse(model, share, options.rounds, draw) for share in SHARES[:-2]]
    report.text(
        f"Time: random Llama, 220 M parameters, bfloat16, {torch.get_num_threads()} threads;"
        f" {PIECES * PIECE_TOKENS:,} tokens in {PIECES} pieces of a prompt seen before, shuffled, and {2 * OWN_TOKENS}"
        " of its own. Time to the first token, median [smallest, largest] of alternating rounds; ratio: times faster."
    )
    report.comparisons("times", timings, "ms", scale=1000)
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/reuse.md"), takes_pair=True, cases=4)
    parser.add_argument("--cases", type=int, default=40)
    run(parser, measure)
