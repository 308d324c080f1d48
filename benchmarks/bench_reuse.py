"""Reuse of spans at other positions: time to the first token, and what it costs in quality (seeds 222 and 230).

Quality on the large demo model over held-out Python, time on random weights of 220 M parameters: prompts made of pieces
of prompts seen before, in another order. Both ways take turns, and each round gives one ratio.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import uvloop

from benchmarks.bench_decode import random_220m
from benchmarks.report import note, publish
from benchmarks.reuse_quality import (
    OTHERS,
    READERS,
    Quality,
    build_cases,
    computed_exactly,
    demo_model,
    edit_quality,
    reuse_quality,
    sequence,
)
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from engine.reuse.settings import ReuseSettings
from experiments.machine import describe, one_line
from experiments.statistics import Interval, spread
from turnout.config import EngineConfig, ModelConfig

RESULT = Path("docs/results/reuse.md")
SHARES = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
CORRECTIONS = (0, 2, 8)
VOCABULARY = 8192
PIECES, PIECE_TOKENS, OWN_TOKENS = 6, 256, 100


@dataclass(frozen=True, slots=True)
class Timing:
    """Time to the first token of a prompt, in seconds, and how many times less it is than of a full prefill."""

    share: float
    seconds: Interval
    full_seconds: Interval
    speedup: Interval


@dataclass(frozen=True, slots=True)
class Row:
    """One way to reuse, and what it gives."""

    name: str
    quality: Quality


def timed_model(device: Device) -> EngineModel:
    """Random weights, bfloat16."""
    settings = ModelConfig(path="-", kv_memory_bytes=512 << 20)
    return EngineModel("random 220 M", prepare(random_220m().to(torch.bfloat16)), settings, EngineConfig(), device)


async def first_token_s(model: EngineModel, tokens: list[int], lossy: bool) -> float:
    """From nothing to the row after a prompt; its blocks are dropped."""
    seq = sequence(tokens, READERS if lossy else OTHERS, lossy)
    started = time.perf_counter()
    await model.extend(seq)
    seconds = time.perf_counter() - started
    model.release(seq)
    return seconds


async def time_reuse(model: EngineModel, share: float, rounds: int, draw: random.Random) -> Timing:
    """Prompts of pieces of a prompt seen before, shuffled, with and without reuse in turns; one warm-up round."""
    model.reuse(ReuseSettings(recompute=share))
    pairs = []
    for _ in range(rounds + 1):
        model.pool.clear_cached()
        pieces = [[draw.randrange(2, VOCABULARY) for _ in range(PIECE_TOKENS)] for _ in range(PIECES)]
        await model.extend(seen := sequence([token for piece in pieces for token in piece], READERS))
        model.release(seen)
        draw.shuffle(pieces)
        own = [[draw.randrange(2, VOCABULARY) for _ in range(OWN_TOKENS)] for _ in range(2)]
        prompt = [*own[0], *(token for piece in pieces for token in piece), *own[1]]
        full = await first_token_s(model, prompt, lossy=False)
        pairs.append((full, await first_token_s(model, prompt, lossy=True)))
    pairs = pairs[1:]
    return Timing(
        share,
        spread([mine for _, mine in pairs]),
        spread([full for full, _ in pairs]),
        spread([full / mine for full, mine in pairs]),
    )


async def measure_quality(count: int) -> list[Row]:
    """Every share, by deviation and by chance; corrections while decoding; edits."""
    device = Device("cpu")
    model, tokenizer = demo_model(device)
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


async def measure_times(rounds: int) -> list[Timing]:
    """Every share that is worth it."""
    device = Device("cpu")
    model = timed_model(device)
    draw = random.Random(0)
    timings = []
    for share in SHARES[:-2]:
        note(f"times, share {share}")
        timings.append(await time_reuse(model, share, rounds, draw))
    await model.close()
    device.close()
    return timings


def to_markdown(rows: list[Row], timings: list[Timing], cases: int, machine: dict[str, str]) -> str:
    """Two tables, with how they were obtained."""
    tokens = PIECES * PIECE_TOKENS
    lines = [
        "# Reuse of spans at other positions",
        "",
        f"`python -m benchmarks.bench_reuse`; {one_line(machine)}.",
        "",
        f"Quality: large demo model, float32, {cases} prompts of three pieces of 96 tokens from prompts seen before, in"
        " another order, with 48 tokens of their own; the next 25 distributions against those of a full prefill."
        " Computed: of the prompt's tokens, weighted by layers.",
        "",
        "| | KL, nats | same arg-max | computed |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.name} | {row.quality.nats:.4f} | {row.quality.agreement:.1%} | {row.quality.computed:.1%} |"
        for row in rows
    ]
    lines += [
        "",
        f"Time: random Llama, 220 M parameters, bfloat16, {torch.get_num_threads()} threads; {tokens:,} tokens in"
        f" {PIECES} pieces of a prompt seen before, shuffled, and {2 * OWN_TOKENS} of its own. Seconds to the first"
        f" token, median [smallest, largest] of alternating rounds.",
        "",
        "| rho | reuse, s | full prefill, s | times faster |",
        "| ---: | --- | --- | --- |",
    ]
    lines += [f"| {t.share:g} | {t.seconds} | {t.full_seconds} | {t.speedup} |" for t in timings]
    return "\n".join([*lines, ""])


def main(cases: int, rounds: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe()
    rows = uvloop.run(measure_quality(cases))
    timings = uvloop.run(measure_times(rounds))
    text = to_markdown(rows, timings, cases, machine)
    document = {
        "machine": machine,
        "quality": [asdict(row) for row in rows],
        "times": [asdict(timing) for timing in timings],
    }
    publish(text, out, document)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few cases, one round, printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    if chosen.quick:
        main(4, 1, chosen.out)
    else:
        main(chosen.cases, chosen.rounds, chosen.out or RESULT)
