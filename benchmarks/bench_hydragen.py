"""Decode speed of requests that share a prefix, with attention that reads it once for all of them and without.

Both sides are the same engine over the same cache; only `engine.shared_attention` differs. They take turns, and each
round gives one ratio. Requests that share nothing are measured too: to them it may cost nothing.

Source: seed 75, "Hydragen: High-Throughput LLM Inference with Shared Prefixes".
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import uvloop

from benchmarks.bench_decode import random_220m
from benchmarks.report import note, publish
from decoding.model import Until
from decoding.sequence import Sequence
from engine.attention.layout import Layout, lay_out
from engine.attention.prefixes import find_prefixes
from engine.attention.step import AttentionStep
from engine.backend import NativeBackend
from engine.cache.store import KVStore
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from engine.native.attention import NativeStep
from experiments.machine import describe, one_line
from experiments.statistics import Interval, spread
from turnout.config import EngineConfig, ModelConfig
from turnout.types import SamplingParams

SUFFIX_TOKENS = 24
MIB = 1 << 20
RESULT = Path("docs/results/hydragen.md")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests at once, the tokens before their own, whether these are common, and the least ratio wanted."""

    requests: int
    prefix: int
    common: bool = True
    goal: float | None = None


CASES = (
    Case(2, 4000),
    Case(8, 1000),
    Case(8, 4000),
    Case(32, 250),
    Case(32, 1000),
    Case(32, 4000, goal=2.0),
    Case(64, 4000),
    Case(8, 2000, common=False, goal=0.98),
    Case(32, 500, common=False, goal=0.98),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second and bytes of KV read in a step, without and with sharing; the ratio round by round."""

    case: Case
    apart: Interval
    shared: Interval
    ratio: Interval
    apart_bytes: int
    shared_bytes: int


class CountingBackend(NativeBackend):
    """Keeps its last step, for what that read."""

    last: NativeStep

    def step(self, layout: Layout, store: KVStore) -> AttentionStep:
        """See `Backend.step`."""
        step = super().step(layout, store)
        assert isinstance(step, NativeStep)
        self.last = step
        return step

    def bytes_read(self, store: KVStore) -> int:
        """Of keys and values, in the last step."""
        layer = store.layers[0]
        return self.last.keys_read * 2 * layer.shape[3] * layer.element_size()


def prompts_of(case: Case, vocab: int) -> list[list[int]]:
    """Random tokens."""
    common = torch.randint(2, vocab, (case.prefix,)).tolist()
    own = torch.randint(2, vocab, (case.requests, case.prefix + SUFFIX_TOKENS)).tolist()
    return [common + tokens[case.prefix :] if case.common else tokens for tokens in own]


async def decode_speed(model: EngineModel, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of concurrent requests whose prompts are in the cache but for the last block."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    sequences = [Sequence(prompt, sampling, 0) for prompt in prompts]
    await asyncio.gather(*(model.decode(seq, Until(max_tokens=1)) for seq in sequences))
    started = time.perf_counter()
    await asyncio.gather(*(model.decode(seq) for seq in sequences))
    elapsed = time.perf_counter() - started
    for seq in sequences:
        model.release(seq)
    return len(prompts) * tokens / elapsed


async def measure(model: EngineModel, case: Case, rounds: int, tokens: int) -> Speed:
    """Both sides in turn over one cache; one warm-up round is thrown away."""
    note(f"{case.requests} requests, {case.prefix} tokens, {'common' if case.common else 'their own'}")
    prompts = prompts_of(case, model.vocab_size)
    keepers = [Sequence(prompt, SamplingParams(), 0) for prompt in prompts]
    for keeper in keepers:
        await model.extend(keeper)
    plan = model.batcher.runner.plan
    backends = {shares: CountingBackend(shares) for shares in (False, True)}
    pairs = []
    for index in range(rounds + 1):
        speeds: dict[bool, float] = {}
        for shares in (False, True) if index % 2 else (True, False):
            plan.backend = backends[shares]
            speeds[shares] = await decode_speed(model, prompts, tokens)
        pairs.append((speeds[False], speeds[True]))
    for keeper in keepers:
        model.release(keeper)
    pairs = pairs[1:]
    return Speed(
        case,
        spread([apart for apart, _ in pairs]),
        spread([shared for _, shared in pairs]),
        spread([shared / apart for apart, shared in pairs]),
        backends[False].bytes_read(model.store),
        backends[True].bytes_read(model.store),
    )


async def measure_all(cases: list[Case], rounds: int, tokens: int) -> list[Speed]:
    """Every case, one after the other, on one model."""
    plain = random_220m().to(torch.bfloat16).eval()
    device = Device("cpu")
    settings = ModelConfig(path="random 220 M", kv_memory_bytes=768 * MIB)
    model = EngineModel("random 220 M", prepare(plain), settings, EngineConfig(token_budget=512), device)
    speeds = [await measure(model, case, rounds, tokens) for case in cases]
    await model.close()
    device.close()
    return speeds


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


def to_markdown(speeds: list[Speed], rounds: int, tokens: int, machine: dict[str, str]) -> str:
    """The tables, with how they were obtained."""
    lines = [
        f"# Attention to shared prefixes (random Llama, 220 M parameters, bfloat16, {torch.get_num_threads()} threads)",
        "",
        f"`make bench-hydragen`; {tokens} tokens decoded by each request after the prefix and {SUFFIX_TOKENS} tokens of"
        f" its own, prefill left out, median of {rounds} alternating rounds [smallest, largest]. Apart:"
        f" `engine.shared_attention` off. {one_line(machine)}.",
        "",
        "| requests | prefix, tokens | apart, tokens/s | shared, tokens/s | ratio | KV read a step, apart, MiB"
        " | shared, MiB | goal | met |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for speed in speeds:
        case, goal, met = speed.case, "", ""
        if case.goal is not None:
            goal, met = f"{case.goal:.2f}", "yes" if speed.ratio.value >= case.goal else "no"
        prefix = f"{case.prefix:,}" if case.common else f"none ({case.prefix:,} own)"
        lines.append(
            f"| {case.requests} | {prefix} | {_whole(speed.apart)} | {_whole(speed.shared)}"
            f" | {speed.ratio.value:.2f} [{speed.ratio.low:.2f}, {speed.ratio.high:.2f}]"
            f" | {speed.apart_bytes / MIB:,.0f} | {speed.shared_bytes / MIB:,.0f} | {goal} | {met} |"
        )
    lines += [
        "",
        "Finding the prefixes of a batch, once a step, 4,000 tokens each:",
        "",
        "| sequences | shared | microseconds |",
        "| ---: | --- | ---: |",
    ]
    for sequences in (32, 64):
        for common in (True, False):
            lines.append(
                f"| {sequences} | {'all' if common else 'nothing'} | {_whole(finding_us(sequences, common))} |"
            )
    return "\n".join([*lines, ""])


def _whole(interval: Interval) -> str:
    return f"{interval.value:.0f} [{interval.low:.0f}, {interval.high:.0f}]"


def main(cases: list[Case], rounds: int, tokens: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe()
    text = to_markdown(uvloop.run(measure_all(cases, rounds, tokens)), rounds, tokens, machine)
    publish(text, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="two cases, one round, results printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    if chosen.quick:
        main([Case(8, 1000), Case(32, 4000, goal=2.0)], 1, chosen.tokens, chosen.out)
    else:
        main(list(CASES), chosen.rounds, chosen.tokens, chosen.out or RESULT)
