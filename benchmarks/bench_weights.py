"""Weights as integers against weights as numbers: perplexity, memory and decode speed of the real model, in one run.

Perplexity is that of the documentation's text in pieces, by the engine's own forward: the ratio over bfloat16 is what
rounding weights and inputs costs. Decode speed is measured in turns with bfloat16, prefill left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import decode_speed, random_prompts
from benchmarks.harness import Comparison, Goal, Report, Side, command_line, compare, run, shown
from decoding.model import ReadSpec
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from engine.cache.blocks import BlockPool
from engine.cache.table import BlockTable
from engine.device import Device
from engine.integer_weights import Weights
from engine.loading import Checkpoint, load_checkpoint
from engine.model import EngineModel
from engine.runner import Feed, Runner
from experiments import real_model
from experiments.stats.intervals import Floats, Interval, bca_mean
from pool.text import TextTokenizer
from turnout.config import EngineConfig, ModelConfig
from turnout.types import SamplingParams

CPU = torch.device("cpu")
BASE: Weights = "dense"
PERPLEXITY_GOALS: dict[Weights, Goal] = {"int8": Goal(1.005, at_most=True), "int4": Goal(1.05, at_most=True)}
TEXT = Path("docs")
PIECE, BLOCK, PROMPT = 512, 16, 128


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexity of one kind of weights, and what was said at load."""

    weights: str
    perplexity: float
    ratio: Interval
    said: str


def pieces(tokenizer: TextTokenizer, count: int) -> Iterator[list[int]]:
    """Tokens of the documentation, `count` pieces of `PIECE`."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(TEXT.glob("*.md")))
    ids = tokenizer.encode(text[: 8 * PIECE * count])
    for start in range(0, min(len(ids) - PIECE + 1, PIECE * count), PIECE):
        yield ids[start : start + PIECE]


@torch.inference_mode()
def losses_by_piece(checkpoint: Checkpoint, texts: list[list[int]]) -> Floats:
    """Nats per token of each piece, read by itself."""
    losses = []
    for ids in texts:
        seq, blocks = Sequence(ids, SamplingParams(max_tokens=1), seed=0), -(-len(ids) // BLOCK)
        store = checkpoint.plan.cache(blocks * BLOCK, CPU)
        table = BlockTable(seq, BlockPool(blocks, BLOCK, checkpoint.plan.rope_length), store)
        table.reserve(len(ids))
        reads = [(place, RowContext(seq), ReadSpec(draw=None, logits=True)) for place in range(len(ids) - 1)]
        [rows] = Runner(checkpoint.plan, store, BLOCK, CPU).run([Feed(table, ids, reads=reads)])
        logits = torch.stack([row.logits for row in rows if row.logits is not None])
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item())
    return np.array(losses)


async def measure(options: argparse.Namespace) -> Report:
    """Perplexities first, then speeds in turns."""
    folder = real_model.model_folder()
    texts = list(pieces(TextTokenizer(folder), options.pieces))
    kinds: list[Weights] = [BASE, *PERPLEXITY_GOALS]
    loaded = {kind: load_checkpoint(folder, torch.bfloat16, CPU, weights=kind) for kind in kinds}
    losses = {kind: losses_by_piece(checkpoint, texts) for kind, checkpoint in loaded.items()}
    qualities = [
        Quality(kind, math.exp(each.mean()), _ratio(each - losses[BASE]), _said(loaded[kind]))
        for kind, each in losses.items()
    ]
    report = Report(
        f"Weights as integers (bfloat16 otherwise, {torch.get_num_threads()} threads)",
        f"`python -m benchmarks.bench_weights`; perplexity of {len(texts)} pieces of {PIECE} tokens of documentation,"
        " its ratio with the 95% interval that the pieces leave;"
        f" decoding after prompts of {PROMPT} tokens, {options.tokens} generated, greedy.",
    )
    columns: dict[str, Any] = {
        "weights": lambda row: row.weights,
        "perplexity": lambda row: row.perplexity,
        "over bfloat16": lambda row: shown(row.ratio, 4),
        "goal": lambda row: _goal(row.weights),
        "said at load": lambda row: row.said,
    }
    report.table("perplexity", qualities, columns)
    report.comparisons("speeds", await _speeds(loaded, options), "tokens/s")
    return report


async def _speeds(loaded: dict[Weights, Checkpoint], options: argparse.Namespace) -> list[Comparison]:
    device, settings = Device("cpu"), ModelConfig(path="-", kv_memory_bytes=256 << 20, max_length=512)
    models = {kind: EngineModel(kind, found, settings, EngineConfig(), device) for kind, found in loaded.items()}
    rows = []
    for requests in options.requests:
        prompts = random_prompts(models[BASE].vocab_size, requests, PROMPT)
        base = _side("bfloat16", models[BASE], prompts, options.tokens)
        for kind in PERPLEXITY_GOALS:
            case = {"weights": kind, "requests": requests}
            sides = (base, _side("integers", models[kind], prompts, options.tokens))
            rows.append(await compare(case, sides, options.rounds))
    for model in models.values():
        await model.close()
    device.close()
    return rows


def _side(name: str, model: EngineModel, prompts: list[list[int]], tokens: int) -> Side[float]:
    return Side(name, lambda _: decode_speed(model, prompts, tokens))


def _ratio(more_nats: Floats) -> Interval:
    mean = bca_mean(more_nats)
    return Interval(*(math.exp(nats) for nats in (mean.value, mean.low, mean.high)))


def _goal(weights: str) -> str:
    return "".join(f"at most {goal.value:g}" for kind, goal in PERPLEXITY_GOALS.items() if kind == weights)


def _said(checkpoint: Checkpoint) -> str:
    return next((note for note in checkpoint.notes if note.startswith("weights ")), "")


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/weights.md"), rounds=3, pieces=4, tokens=16)
    parser.add_argument("--pieces", type=int, default=64, help="of text")
    parser.add_argument("--tokens", type=int, default=48, help="generated for each request")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="at once")
    run(parser, measure)
