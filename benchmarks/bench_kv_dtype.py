"""Keys and values as bytes against those of the model's dtype: perplexity, memory and decode speed of the real model.

Perplexity is that of the documentation's text in pieces, by the engine's own forward. Decode steps are timed in turns
over caches of random keys and values, so that nothing has to be prefilled; contexts beyond the checkpoint's positions
say something of speed alone.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.bench_weights import BLOCK, PIECE, losses_by_piece, pieces
from benchmarks.harness import Comparison, Goal, Report, Side, blocking, command_line, compare, run
from engine.cache.kv_formats import KVDtype
from engine.cache.paged_kv import PagedKV
from engine.costs.probe import Group, Probe
from engine.loading import Checkpoint, load_checkpoint, round_kv
from engine.runner import Runner
from experiments import real_model
from pool.text import TextTokenizer

CPU = torch.device("cpu")
KINDS: tuple[KVDtype, ...] = get_args(KVDtype)
BASE: KVDtype = "auto"
PERPLEXITY_GOAL = Goal(1.005, at_most=True)
MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class Kept:
    """What one way of keeping costs."""

    kv_dtype: str
    perplexity: float
    ratio: float
    token_bytes: int
    tokens_in_a_gib: int


def kept_of(kv_dtype: KVDtype, checkpoint: Checkpoint, loss: float, base: float) -> Kept:
    """One row; `loss` and `base` are in nats per token."""
    plan = checkpoint.plan
    size = PagedKV.slot_bytes(plan.num_layers, plan.kv_heads, plan.head_dim, checkpoint.dtype, kv_dtype)
    return Kept(kv_dtype, math.exp(loss), math.exp(loss - base), size, MEMORY // size)


def losses_of(checkpoint: Checkpoint, texts: list[list[int]]) -> dict[KVDtype, float]:
    """Nats per token with each kind of cache, in one model's weights; ends with the plain kind."""
    losses: dict[KVDtype, float] = {}
    for kv_dtype in reversed(KINDS):
        round_kv(checkpoint, kv_dtype)
        losses[kv_dtype] = float(losses_by_piece(checkpoint, texts).mean())
    return losses


@torch.inference_mode()
def probe_of(checkpoint: Checkpoint, kv_dtype: KVDtype, tokens: int) -> Probe:
    """Time steps over a cache of `tokens` random tokens."""
    plan = checkpoint.plan
    plan.kv_dtype, blocks = kv_dtype, -(-tokens // BLOCK)
    store = plan.cache(blocks * BLOCK, CPU)
    numbers = torch.randn(blocks * BLOCK, 2, plan.kv_heads, plan.head_dim).to(checkpoint.dtype)
    for layer in range(plan.num_layers):
        store.write(layer, torch.arange(blocks * BLOCK), numbers)
    plan.kv_dtype = BASE
    return Probe(Runner(plan, store, BLOCK, CPU), blocks, tokens, tokens, tokens)


async def speed(checkpoint: Checkpoint, requests: int, context: int, options: argparse.Namespace) -> Comparison:
    """Tokens per second of `requests` that have `context` tokens each."""
    room = requests * (-(-(context + 1) // BLOCK) * BLOCK)
    shape = (Group(requests, 1, context),)

    def steps(probe: Probe) -> float:
        return requests / probe.sample(shape, options.steps).seconds

    base, other = (Side(name, blocking(partial(steps, probe_of(checkpoint, name, room)))) for name in KINDS)
    return await compare({"context": context, "requests": requests}, (base, other), options.rounds)


async def measure(options: argparse.Namespace) -> Report:
    """Perplexities first, then speeds in turns."""
    folder = real_model.model_folder()
    checkpoint = load_checkpoint(folder, torch.bfloat16, CPU)
    texts = list(pieces(TextTokenizer(folder), options.pieces))
    losses = losses_of(checkpoint, texts)
    rows = [kept_of(kind, checkpoint, losses[kind], losses[BASE]) for kind in KINDS]
    report = Report(
        f"Keys and values as bytes (SmolLM2-135M-Instruct in bfloat16, {torch.get_num_threads()} threads)",
        f"`python -m benchmarks.bench_kv_dtype`; perplexity of {len(texts)} pieces of {PIECE} tokens of documentation;"
        f" the fastest of {options.steps} decode steps after each number of tokens, caches of random numbers.",
    )
    columns: dict[str, Any] = {
        "kv_dtype": lambda row: row.kv_dtype,
        "perplexity": lambda row: row.perplexity,
        "over auto": lambda row: f"{row.ratio:.4f}",
        "goal": lambda row: "" if row.kv_dtype == BASE else f"at most {PERPLEXITY_GOAL.value:g}",
        "bytes per token": lambda row: f"{row.token_bytes:,}",
        "tokens in a GiB": lambda row: f"{row.tokens_in_a_gib:,}",
    }
    report.table("kept", rows, columns)
    cases = [(requests, context) for context in options.contexts for requests in options.requests]
    speeds = [await speed(checkpoint, requests, context, options) for requests, context in cases]
    report.comparisons("speeds", speeds, "tokens/s")
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/kv_dtype.md"), rounds=5, pieces=2, contexts=[512], steps=2)
    parser.add_argument("--pieces", type=int, default=16, help="of text")
    parser.add_argument("--steps", type=int, default=8, help="decode steps in a turn, of which the fastest counts")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens of each request")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="at once")
    run(parser, measure)
