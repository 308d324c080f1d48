"""Logits processors: what a chain of them costs next to a step of the real model, and what the searches do to loops.

The cost is that of one step's rows, without a forward; a step is measured in the same turns. Loops are counted in free
text that the model continues greedily: the share of 4-grams that occurred before in the answer.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import decode_speed, random_prompts
from benchmarks.harness import Goal, Report, Side, blocking, command_line, compare, run, shown
from benchmarks.strategies import at_once
from decoding.logits import choice_scores
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from experiments import real_model
from experiments.stats.intervals import Interval, bootstrap_mean
from pool.local_pool import LocalPool
from training.data import real_text
from turnout.calls import Chunk, GenerateCall
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

FIVE = ({"name": "top_n_sigma", "n": 2.0}, "eta_cutoff", "dynamic_temperature", {"name": "min_p", "p": 0.02}, "xtc")
CHAINS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "usual": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "five": {"temperature": 0.8, "processors": FIVE},
}
GOAL = Goal(0.10, at_most=True)
SEARCHES: dict[str, tuple[str | dict[str, Any], ...]] = {
    "greedy": (),
    "fsd": ("fsd",),
    "momentum": ("momentum",),
    "no_repeat_ngram 4": ({"name": "no_repeat_ngram", "n": 4},),
}
WORDS, NGRAM = 12, 4  # of a passage that is continued; of a loop


@dataclass(frozen=True, slots=True)
class Loops:
    """Of one search: share of 4-grams that repeat, and of the answers that are mostly loop."""

    search: str
    repeated: Interval
    looping: float
    seconds: float


def rows_of(rows: int, vocab: int, sampling: dict[str, Any]) -> list[RowContext]:
    """Sequences with some text behind them."""
    draw = torch.Generator().manual_seed(1)
    params = SamplingParams.model_validate({"max_tokens": 500, **sampling})
    return [
        RowContext(Sequence(torch.randint(vocab, (200,), generator=draw).tolist(), params, row)) for row in range(rows)
    ]


def chain_ms(logits: torch.Tensor, sampling: dict[str, Any], times: int) -> float:
    """Milliseconds that the processors of one step take."""
    rows, vocab = logits.shape
    contexts = rows_of(rows, vocab, sampling)
    choice_scores(logits, contexts)
    began = time.perf_counter()
    for _ in range(times):
        choice_scores(logits, contexts)
    return 1000 * (time.perf_counter() - began) / times


def repeated(ids: list[int]) -> float:
    """Share of an answer's 4-grams that occurred before in it."""
    grams = [tuple(ids[place : place + NGRAM]) for place in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


async def loops(pool: LocalPool, name: str, tokens: int, count: int) -> Loops:
    """Let the model continue passages."""
    choices = tuple(PartChoice.model_validate(each) for each in SEARCHES[name])
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, processors=choices)
    texts = [" ".join(text.split()[-WORDS:]) for text in real_text.prompts("summary")[:count]]

    async def one(place: int, text: str) -> float:
        call = GenerateCall(f"{name} {place}", pool.name, sampling, prompt=text, method="plain")
        events = [event async for event in pool.generate(call)]
        return repeated([token.id for event in events if isinstance(event, Chunk) for token in event.tokens])

    began = time.perf_counter()
    shares = await at_once([one(place, text) for place, text in enumerate(texts)], 16)
    looping = sum(share > 0.5 for share in shares) / len(shares)
    return Loops(name, bootstrap_mean(np.array(shares), seed=0), looping, time.perf_counter() - began)


async def measure(options: argparse.Namespace) -> Report:
    """Costs first, then loops."""
    report = Report(
        "Logits processors",
        "`python -m benchmarks.bench_processors`; a step is one token of each request of the real model, all of it; the"
        " chain acts on the same number of rows of its vocabulary.",
    )
    pool = LocalPool.load(real_model.POOL, real_model.alone())
    model = pool.engines[pool.roles["large"]]
    logits = torch.randn((options.rows, model.vocab_size), generator=torch.Generator().manual_seed(0)) * 3
    prompts = random_prompts(model.vocab_size, options.rows, 32)

    async def step(_: int) -> float:
        rate = await decode_speed(model, prompts, options.steps)
        return 1000 * len(prompts) / rate

    costs = []
    for name, sampling in CHAINS.items():
        turn = blocking(partial(chain_ms, logits, sampling, options.steps))
        costs.append(await compare({"chain": name}, (Side("step", step), Side("chain", turn)), options.rounds, GOAL))
    report.comparisons(f"time at {options.rows} rows of {model.vocab_size:,} tokens", costs, "ms")
    found = [await loops(pool, name, options.tokens, options.each) for name in SEARCHES]
    await pool.close()
    columns: dict[str, Any] = {
        "search": lambda row: row.search,
        "4-grams that repeat": lambda row: shown(row.repeated, 3),
        "answers mostly loop": lambda row: f"{row.looping:.2f}",
        "seconds": lambda row: f"{row.seconds:.1f}",
    }
    report.table("loops", found, columns)
    return report


if __name__ == "__main__":
    made = command_line(__doc__, Path("docs/results/processors.md"), rounds=3, each=4, tokens=48, rows=8)
    made.add_argument("--rows", type=int, default=64, help="of a step")
    made.add_argument("--steps", type=int, default=8, help="of a turn")
    made.add_argument("--each", type=int, default=16, help="passages that are continued")
    made.add_argument("--tokens", type=int, default=192, help="of an answer")
    run(made, measure)
