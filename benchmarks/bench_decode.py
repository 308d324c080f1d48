"""Decode speed of the engine against Hugging Face `generate`, same weights and dtype, in one run.

Both sides decode the same number of tokens after prompts of the same length, greedily, without an end token;
prefill is left out on both sides. Sides take turns, and each round gives one ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import SUBJECTS, decode_speed, open_engine, random_prompts
from benchmarks.harness import Comparison, Goal, Report, Side, command_line, compare, run
from engine.model import EngineModel
from experiments.pairs import REAL
from turnout.config import EngineConfig

PROMPT_TOKENS = 128
GOALS = {1: Goal(1.0), 8: Goal(1.3)}  # by requests at once


def plain_speed(model: Any, concurrency: int, tokens: int) -> float:
    """Tokens per second of `generate` on a batch of equally long prompts: its best case."""
    ids = torch.randint(2, model.config.vocab_size, (concurrency, PROMPT_TOKENS))

    def timed(count: int) -> float:
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    with torch.inference_mode():
        prefill = timed(1)
        return concurrency * (tokens - 1) / (timed(tokens) - prefill)


async def measure_subject(subject: str, options: argparse.Namespace) -> list[Comparison]:
    """Both sides in turn, at each concurrency."""
    plain = SUBJECTS[subject]().to(getattr(torch, options.dtype)).eval()
    plain.generation_config.eos_token_id = None
    tokens = options.tokens

    async def at(concurrency: int, ours: EngineModel) -> Comparison:
        prompts = random_prompts(ours.vocab_size, concurrency, PROMPT_TOKENS)
        generate = Side("generate", lambda _: asyncio.to_thread(plain_speed, plain, concurrency, tokens))
        engine = Side("engine", lambda _: decode_speed(ours, prompts, tokens))
        case = {"model": subject, "requests": concurrency}
        return await compare(case, (generate, engine), options.rounds, GOALS[concurrency])

    async with open_engine(copy.deepcopy(plain), engine=EngineConfig(token_budget=1024)) as [ours]:
        return [await at(concurrency, ours) for concurrency in GOALS]


async def measure(options: argparse.Namespace) -> Report:
    """Every subject, one after the other."""
    report = Report(
        f"Decode speed against Hugging Face generate ({options.dtype}, {torch.get_num_threads()} threads)",
        f"`make bench`; prompt {PROMPT_TOKENS} tokens, {options.tokens} generated, greedy, median of {options.rounds}"
        " alternating rounds [smallest, largest]. `generate` gets its best case: one static batch of equally long"
        " prompts.",
    )
    rows = [row for subject in options.subjects for row in await measure_subject(subject, options)]
    report.comparisons("speeds", rows, "tokens/s")
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/decode.md"))
    usual = [name for name in SUBJECTS if name != REAL]
    parser.add_argument("--subjects", nargs="+", choices=sorted(SUBJECTS), default=usual)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    run(parser, measure)
