"""What a structure costs: decode speed of answers held to a JSON schema, against the same number of free tokens.

Both sides are the same engine and the same prompts; they take turns, and each round gives one ratio. The schema asks
for a list longer than any answer, so that both sides write the same number of tokens. Random words stand for the
vocabularies of large models: 32,000 and 128,000 of them, over a small model, so that masks weigh more than they
would beside a large one. Speculation drafts with a twin of the model, which makes all drafts right on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.bench_decode import PROMPT_TOKENS, SUBJECTS
from benchmarks.random_vocabulary import random_vocabulary
from benchmarks.report import note, publish
from decoding.constraints.base import Constraint
from decoding.constraints.grammar import Compiler
from decoding.fakes import ListText
from decoding.model import ModelPool, Request, Until
from decoding.sequence import Sequence
from engine.device import Device
from engine.loading import prepare
from engine.model import EngineModel
from engine.text import TextTokenizer
from experiments.machine import describe, one_line
from experiments.statistics import Interval, spread
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig, ModelConfig, model_path
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import SamplingParams

GOAL = 0.95
PLAIN, DRAFTED = "plain", "speculative"
# How many requests at once, by how they are decoded.
WAYS: dict[str, tuple[int, ...]] = {PLAIN: (1, 8, 32), DRAFTED: (8,)}
DRAFT = {"drafter": "model_chain", "verifier": "match", "length": {"name": "fixed", "most": 4}}
VOCABULARIES = {"random words, 32k": 32_000, "random words, 128k": 128_000}
RESULT = Path("docs/results/structure.md")
NAMES = [*SUBJECTS, *VOCABULARIES]
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["small", "medium", "large"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "count", "kind", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of both sides at one concurrency, and their ratio round by round."""

    subject: str
    way: str
    concurrency: int
    free: Interval
    bound: Interval
    ratio: Interval


def words_model(vocab_size: int) -> Any:
    """A small Llama with random weights and a large vocabulary."""
    config = llama_config(
        vocab_size,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1408,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    return random_model(config, seed=0)


def checkpoint_of(subject: str) -> Any:
    """A subject's weights."""
    return words_model(VOCABULARIES[subject]) if subject in VOCABULARIES else SUBJECTS[subject]()


async def constraint_of(subject: str) -> Constraint:
    """The schema, compiled for a subject's vocabulary."""
    structure = Structure.model_validate({"json_schema": SCHEMA})
    if subject in VOCABULARIES:
        return Compiler(random_vocabulary(VOCABULARIES[subject])).compile(structure)
    return await TextTokenizer(model_path(ModelConfig(path="demo:large"))).structures.made(structure, tenant="bench")


async def decode_speed(
    models: ModelPool, way: str, prompts: list[list[int]], tokens: int, bound: Constraint | None
) -> float:
    """Tokens per second of concurrent requests after their first token."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    sequences = [Sequence(prompt, sampling, 0) for prompt in prompts]
    for seq in sequences:
        seq.constraint = bound.clone() if bound is not None else None
    await asyncio.gather(*(models.large.decode(seq, Until(max_tokens=1)) for seq in sequences))
    if way == DRAFTED:
        await asyncio.gather(*(models.small.absorb(seq) for seq in sequences))
    started = time.perf_counter()
    await asyncio.gather(*(decode(models, way, seq) for seq in sequences))
    elapsed = time.perf_counter() - started
    for seq in sequences:
        for model in models.models.values():
            model.release(seq)
    return len(prompts) * (tokens - 1) / elapsed


async def decode(models: ModelPool, way: str, seq: Sequence) -> None:
    """One answer to its end."""
    if way == PLAIN:
        await models.large.decode(seq)
        return
    info = get_method("speculative")
    async for _ in info.run(Request("r", seq), models, info.parse(DRAFT)):
        pass


async def measure(subject: str, rounds: int, tokens: int) -> list[Speed]:
    """Both sides in turn, which goes first too; one warm-up round is thrown away."""
    device, constraint = Device("cpu"), await constraint_of(subject)
    settings = ModelConfig(path=subject, kv_memory_bytes=512 << 20)
    plain = checkpoint_of(subject).to(torch.bfloat16).eval()
    made: dict[str, EngineModel] = {
        role: EngineModel(role, prepare(copy.deepcopy(plain)), settings, EngineConfig(token_budget=1024), device)
        for role in ("small", "large")
    }
    texts = ListText([str(token) for token in range(made["large"].vocab_size)])
    models = ModelPool(dict(made), {role: role for role in made}, texts)
    speeds = [
        await compare(subject, models, way, concurrency, constraint, rounds, tokens)
        for way, concurrencies in WAYS.items()
        for concurrency in concurrencies
    ]
    for model in made.values():
        await model.close()
    device.close()
    return speeds


async def compare(
    subject: str, models: ModelPool, way: str, concurrency: int, constraint: Constraint, rounds: int, tokens: int
) -> Speed:
    """One row of the table."""
    note(f"{subject}, {way}, {concurrency} requests")
    prompts = torch.randint(2, models.large.vocab_size, (concurrency, PROMPT_TOKENS)).tolist()
    pairs = []
    for index in range(rounds + 1):
        made: dict[bool, float] = {}
        for bound in (False, True) if index % 2 else (True, False):
            made[bound] = await decode_speed(models, way, prompts, tokens, constraint if bound else None)
        pairs.append((made[False], made[True]))
    pairs = pairs[1:]
    return Speed(
        subject,
        way,
        concurrency,
        spread([free for free, _ in pairs]),
        spread([bound for _, bound in pairs]),
        spread([bound / free for free, bound in pairs]),
    )


def to_markdown(speeds: list[Speed], rounds: int, tokens: int, machine: dict[str, str]) -> str:
    """The table, with how it was obtained."""
    lines = [
        f"# What a structure costs (bfloat16, {torch.get_num_threads()} threads)",
        "",
        f"`make bench-structure`; prompt {PROMPT_TOKENS} tokens, {tokens} generated, greedy, median of {rounds}"
        f" alternating rounds [smallest, largest]. Bound: a list of objects by JSON schema, every row masked."
        f" {one_line(machine)}.",
        "",
        "| model | decoding | requests | free, tokens/s | bound, tokens/s | ratio | goal | met |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for speed in speeds:
        met = "yes" if speed.ratio.value >= GOAL else "no"
        lines.append(
            f"| {speed.subject} | {speed.way} | {speed.concurrency} | {_whole(speed.free)} | {_whole(speed.bound)} "
            f"| {speed.ratio.value:.3f} [{speed.ratio.low:.3f}, {speed.ratio.high:.3f}] | {GOAL:.2f} | {met} |"
        )
    return "\n".join([*lines, ""])


def _whole(interval: Interval) -> str:
    return f"{interval.value:.0f} [{interval.low:.0f}, {interval.high:.0f}]"


async def measure_all(subjects: list[str], rounds: int, tokens: int) -> list[Speed]:
    """Every subject, one after the other."""
    speeds: list[Speed] = []
    for subject in subjects:
        speeds += await measure(subject, rounds, tokens)
    return speeds


def main(subjects: list[str], rounds: int, tokens: int, out: Path | None) -> None:
    """Measure, print, and save where there is a place for it."""
    text = to_markdown(uvloop.run(measure_all(subjects, rounds, tokens)), rounds, tokens, describe())
    publish(text, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="one round, results printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    chosen = parser.parse_args()
    rounds, out = (1, chosen.out) if chosen.quick else (chosen.rounds, chosen.out or RESULT)
    main(chosen.subjects, rounds, chosen.tokens, out)
