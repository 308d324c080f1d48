"""Decode speed of requests that share a prefix, with attention that reads it once for all of them and without.

Both sides are the same engine over the same cache; only `engine.shared_attention` differs. They take turns, and each
round gives one ratio. Requests that share nothing are measured too: to them it may cost nothing.

Source: paper #75, "Hydragen: High-Throughput LLM Inference with Shared Prefixes".
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.engines import decode_speed, open_engine, random_220m, random_prompts
from benchmarks.harness import Comparison, Goal, Report, Side, command_line, compare, run, shown
from decoding.sequence import Sequence
from engine.attention.layout import Layout, lay_out
from engine.attention.prefixes import find_prefixes
from engine.attention.step import AttentionStep
from engine.backends.base import NativeBackend
from engine.backends.native.attention import NativeStep
from engine.cache.paged_kv import PagedKV
from engine.model import EngineModel
from experiments.stats.intervals import Interval, spread
from turnout.config import EngineConfig
from turnout.types import SamplingParams

SUFFIX_TOKENS = 24
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Requests at once, the tokens before their own, whether these are common, and the least ratio wanted."""

    requests: int
    prefix: int
    common: bool = True
    goal: Goal | None = None


CASES = (
    Case(2, 4000),
    Case(8, 1000),
    Case(8, 4000),
    Case(32, 250),
    Case(32, 1000),
    Case(32, 4000, goal=Goal(2.0)),
    Case(64, 4000),
    Case(8, 2000, common=False, goal=Goal(0.98)),
    Case(32, 500, common=False, goal=Goal(0.98)),
)
QUICK = (1, 5)  # of these


class CountingBackend(NativeBackend):
    """Attention backend that keeps its last step, to count what it read."""

    last: NativeStep

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """See `Backend.step`."""
        step = super().step(layout, store)
        assert isinstance(step, NativeStep)
        self.last = step
        return step

    def bytes_read(self, store: PagedKV) -> int:
        """Of keys and values, in the last step."""
        layer = store.layers[0]
        return self.last.keys_read * 2 * layer.shape[3] * layer.element_size()


def prompts_of(case: Case, vocab: int) -> list[list[int]]:
    """Random tokens."""
    [common, *own] = random_prompts(vocab, case.requests + 1, case.prefix + SUFFIX_TOKENS)
    return [common[: case.prefix] + tokens[case.prefix :] if case.common else tokens for tokens in own]


async def measure_case(model: EngineModel, case: Case, rounds: int, tokens: int) -> Comparison:
    """Both sides in turn over one cache that holds the prompts but for the last block."""
    prompts = prompts_of(case, model.vocab_size)
    keepers = [Sequence(prompt, SamplingParams(), 0) for prompt in prompts]
    for keeper in keepers:
        await model.extend(keeper)
    plan = model.batcher.runner.plan
    backends = {name: CountingBackend(name == "shared") for name in ("apart", "shared")}

    async def turn(name: str, _: int) -> float:
        plan.backend = backends[name]
        return await decode_speed(model, prompts, tokens + 1)

    apart, shared = (Side(name, partial(turn, name)) for name in backends)
    prefix = f"{'' if case.common else 'none, own '}{case.prefix:,}"
    row = await compare({"requests": case.requests, "prefix, tokens": prefix}, (apart, shared), rounds, case.goal)
    for keeper in keepers:
        model.release(keeper)
    read = {name: shown(backend.bytes_read(model.store) / MIB) for name, backend in backends.items()}
    return replace(row, more={f"KV read a step, {name}, MiB": mib for name, mib in read.items()})


@dataclass(frozen=True, slots=True)
class Finding:
    """Microseconds that finding the prefixes of one batch takes."""

    sequences: int
    common: bool
    took_us: Interval


def finding_us(sequences: int, common: bool, prefix: int = 4000, block: int = 16) -> Interval:
    """Microseconds that finding the prefixes of one batch takes."""
    shared = np.arange(prefix // block, dtype=np.int32)
    tables = [shared + (0 if common else i * len(shared)) for i in range(sequences)]
    ends = [np.array([100_000 + 2 * i, 100_001 + 2 * i], dtype=np.int32) for i in range(sequences)]
    tables = [np.concatenate([table, end]) for table, end in zip(tables, ends, strict=True)]
    cached = [len(shared) * block + block // 2] * sequences
    layout = lay_out([0] * sequences, [1] * sequences, cached, tables, block, {})
    times = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(20):
            find_prefixes(layout)
        times.append((time.perf_counter() - started) / 20 * 1e6)
    return spread(times)


async def measure(options: argparse.Namespace) -> Report:
    """Every case, one after the other, on one model."""
    report = Report(
        f"Attention to shared prefixes (random Llama, 220 M parameters, bfloat16, {torch.get_num_threads()} threads)",
        f"`make bench-hydragen`; {options.tokens} tokens decoded by each request after the prefix and {SUFFIX_TOKENS}"
        f" tokens of its own, prefill left out, median of {options.rounds} alternating rounds [smallest, largest]."
        " Apart: `engine.shared_attention` off.",
    )
    plain = random_220m().to(torch.bfloat16).eval()
    async with open_engine(plain, kv_bytes=768 * MIB, engine=EngineConfig(token_budget=512)) as [model]:
        cases = [CASES[index] for index in QUICK] if options.quick else CASES
        speeds = [await measure_case(model, case, options.rounds, options.tokens) for case in cases]
    report.comparisons("speeds", speeds, "tokens/s")
    report.text("Finding the prefixes of a batch, once a step, 4,000 tokens each:")
    found = [Finding(many, common, finding_us(many, common)) for many in (32, 64) for common in (True, False)]
    columns = {
        "sequences": lambda each: each.sequences,
        "shared": lambda each: "all" if each.common else "nothing",
        "microseconds": lambda each: shown(each.took_us),
    }
    report.table("finding", found, columns)
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/hydragen.md"), rounds=7)
    parser.add_argument("--tokens", type=int, default=16)
    run(parser, measure)
