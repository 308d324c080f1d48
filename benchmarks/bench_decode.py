"""Decode speed of the engine against Hugging Face `generate`, same weights and dtype, in one run.

Both sides decode the same number of tokens after prompts of the same length, greedily, without an end token;
prefill is left out on both sides. Sides take turns, and each round gives one ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop
from transformers import AutoModelForCausalLM

from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.workloads import VOCAB
from benchmarks.report import publish
from decoding.model import Until
from decoding.sequence import Sequence
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from experiments.statistics import Interval, spread
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig, model_path
from turnout.types import SamplingParams

PROMPT_TOKENS = 128
GOALS = {1: 1.0, 8: 1.3}
RESULT = Path("docs/results/decode.md")


def random_220m() -> Any:
    """A Llama of about 220 M parameters with random weights."""
    special = {"pad_token_id": 0, "eos_token_id": 1}
    config = llama_config(VOCAB, **SHAPES["220 M"], max_position_embeddings=4096, tie_word_embeddings=False, **special)
    return random_model(config, seed=0)


def demo(role: str) -> Any:
    """A shipped demo model."""
    return AutoModelForCausalLM.from_pretrained(model_path(ModelConfig(path=f"demo:{role}")))


SUBJECTS: dict[str, Callable[[], Any]] = {
    "demo small": lambda: demo("small"),
    "demo large": lambda: demo("large"),
    "random 220 M": random_220m,
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of both sides at one concurrency, and their ratio round by round."""

    subject: str
    concurrency: int
    plain: Interval
    ours: Interval
    ratio: Interval


def plain_speed(model: Any, concurrency: int, tokens: int, vocab: int) -> float:
    """Tokens per second of `generate` on a batch of equally long prompts: its best case."""
    ids = torch.randint(2, vocab, (concurrency, PROMPT_TOKENS))

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


async def engine_speed(model: EngineModel, concurrency: int, tokens: int, vocab: int) -> float:
    """Tokens per second of concurrent requests in the engine."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    sequences = [Sequence(torch.randint(2, vocab, (PROMPT_TOKENS,)).tolist(), sampling, 0) for _ in range(concurrency)]
    await asyncio.gather(*(model.decode(seq, Until(max_tokens=1)) for seq in sequences))
    started = time.perf_counter()
    await asyncio.gather(*(model.decode(seq) for seq in sequences))
    elapsed = time.perf_counter() - started
    for seq in sequences:
        model.release(seq)
    return concurrency * (tokens - 1) / elapsed


async def measure(subject: str, dtype: torch.dtype, rounds: int, tokens: int) -> list[Speed]:
    """Take turns between both sides; one warm-up round is thrown away."""
    plain = SUBJECTS[subject]().to(dtype).eval()
    plain.generation_config.eos_token_id = None
    vocab = plain.config.vocab_size
    device = Device("cpu")
    settings = ModelConfig(path=subject, kv_memory_bytes=512 << 20)
    ours = EngineModel(subject, prepare(copy.deepcopy(plain)), settings, EngineConfig(token_budget=1024), device)
    speeds = []
    for concurrency in GOALS:
        pairs = []
        for _ in range(rounds + 1):
            theirs = await asyncio.to_thread(plain_speed, plain, concurrency, tokens, vocab)
            pairs.append((theirs, await engine_speed(ours, concurrency, tokens, vocab)))
        pairs = pairs[1:]
        speeds.append(
            Speed(
                subject,
                concurrency,
                spread([theirs for theirs, _ in pairs]),
                spread([mine for _, mine in pairs]),
                spread([mine / theirs for theirs, mine in pairs]),
            )
        )
    await ours.close()
    device.close()
    return speeds


def to_markdown(speeds: list[Speed], dtype: str, rounds: int, tokens: int) -> str:
    """The table, with how it was obtained."""
    lines = [
        f"# Decode speed against Hugging Face generate ({dtype}, {torch.get_num_threads()} threads)",
        "",
        f"`make bench`; prompt {PROMPT_TOKENS} tokens, {tokens} generated, greedy, median of {rounds} alternating"
        " rounds [smallest, largest]. `generate` gets its best case: one static batch of equally long prompts.",
        "",
        "| model | requests | generate, tokens/s | engine, tokens/s | ratio | goal | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for speed in speeds:
        goal = GOALS[speed.concurrency]
        met = "yes" if speed.ratio.value >= goal else "no"
        lines.append(
            f"| {speed.subject} | {speed.concurrency} | {_whole(speed.plain)} | {_whole(speed.ours)} "
            f"| {speed.ratio.value:.2f} [{speed.ratio.low:.2f}, {speed.ratio.high:.2f}] | {goal:.1f} | {met} |"
        )
    return "\n".join([*lines, ""])


def _whole(interval: Interval) -> str:
    return f"{interval.value:.0f} [{interval.low:.0f}, {interval.high:.0f}]"


async def measure_all(subjects: list[str], dtype: str, rounds: int, tokens: int) -> list[Speed]:
    """Every subject, one after the other."""
    speeds: list[Speed] = []
    for subject in subjects:
        speeds += await measure(subject, getattr(torch, dtype), rounds, tokens)
    return speeds


def main(subjects: list[str], dtype: str, rounds: int, tokens: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    speeds = uvloop.run(measure_all(subjects, dtype, rounds, tokens))
    text = to_markdown(speeds, dtype, rounds, tokens)
    publish(text, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", nargs="+", choices=sorted(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="one round, results printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    rounds, out = (1, chosen.out) if chosen.quick else (chosen.rounds, chosen.out or RESULT)
    main(chosen.subjects, chosen.dtype, rounds, chosen.tokens, out)
