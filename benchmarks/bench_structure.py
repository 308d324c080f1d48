"""Cost of a structure: decode speed of answers held to a JSON schema, against the same number of free tokens.

Both sides are the same engine and the same prompts; they take turns, and each round gives one ratio. The schema asks
for a list longer than any answer, so that both sides write the same number of tokens. Random words stand for the
vocabularies of large models: 32,000 and 128,000 of them, over a small model, so that masks weigh more than they
would next to a large one. Speculation drafts with a twin of the model, which makes all drafts right on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_decode import PROMPT_TOKENS
from benchmarks.engines import SUBJECTS, open_engine, random_prompts
from benchmarks.harness import Comparison, Goal, Report, Side, command_line, compare, run
from benchmarks.random_vocabulary import random_vocabulary
from decoding.constraints.base import Constraint
from decoding.fakes import ListText
from decoding.model import ModelPool, Request, StopCondition
from decoding.sequence import Sequence
from decoding.structures import Compiler
from experiments import real_model
from experiments.pairs import DEMO, REAL, open_pair
from pool.text import TextTokenizer
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig
from turnout.registry import get_method
from turnout.structure import Structure
from turnout.types import SamplingParams

GOAL = Goal(0.95)
PLAIN, DRAFTED = "plain", "speculative"
# How many requests at once, by how they are decoded.
WAYS: dict[str, tuple[int, ...]] = {PLAIN: (1, 8, 32), DRAFTED: (8,)}
DRAFT = {"drafter": "model_chain", "verifier": "match", "length": {"name": "fixed", "most": 4}}
VOCABULARIES = {"random words, 32k": 32_000, "random words, 128k": 128_000}
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
    folder = real_model.model_folder() if subject == REAL else open_pair(DEMO).folder("large")
    return await TextTokenizer(folder).structures.made(structure, tenant="bench")


async def decode_speed(
    models: ModelPool, way: str, prompts: list[list[int]], tokens: int, bound: Constraint | None
) -> float:
    """Tokens per second of concurrent requests after their first token."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    sequences = [Sequence(prompt, sampling, 0) for prompt in prompts]
    for seq in sequences:
        seq.constraint = bound.clone() if bound is not None else None
    await asyncio.gather(*(models.large.decode(seq, StopCondition(max_tokens=1)) for seq in sequences))
    if way == DRAFTED:
        await asyncio.gather(*(models.small.prefill_ahead(seq) for seq in sequences))
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


async def measure_subject(subject: str, options: argparse.Namespace) -> list[Comparison]:
    """Both sides in turn, in each way of decoding, at each concurrency."""
    constraint = await constraint_of(subject)
    plain = checkpoint_of(subject).to(torch.bfloat16).eval()
    tokens = options.tokens

    async def at(way: str, concurrency: int, models: ModelPool) -> Comparison:
        prompts = random_prompts(models.large.vocab_size, concurrency, PROMPT_TOKENS)
        free = Side("free", lambda _: decode_speed(models, way, prompts, tokens, None))
        bound = Side("bound", lambda _: decode_speed(models, way, prompts, tokens, constraint))
        case = {"model": subject, "decoding": way, "requests": concurrency}
        return await compare(case, (free, bound), options.rounds, GOAL)

    roles, engine = ("small", "large"), EngineConfig(token_budget=1024)
    async with open_engine(*(copy.deepcopy(plain) for _ in roles), names=roles, engine=engine) as made:
        texts = ListText([str(token) for token in range(made[0].vocab_size)])
        models = ModelPool(dict(zip(roles, made, strict=True)), dict(zip(roles, roles, strict=True)), texts)
        return [await at(way, concurrency, models) for way, many in WAYS.items() for concurrency in many]


async def measure(options: argparse.Namespace) -> Report:
    """Every subject, one after the other."""
    report = Report(
        f"What a structure costs (bfloat16, {torch.get_num_threads()} threads)",
        f"`make bench-structure`; prompt {PROMPT_TOKENS} tokens, {options.tokens} generated, greedy, median of"
        f" {options.rounds} alternating rounds [smallest, largest]. Bound: a list of objects by JSON schema, every row"
        " masked.",
    )
    rows = [row for subject in options.subjects for row in await measure_subject(subject, options)]
    report.comparisons("speeds", rows, "tokens/s", digits=3)
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/structure.md"), rounds=7)
    parser.add_argument("--subjects", nargs="+", choices=NAMES, default=[name for name in NAMES if name != REAL])
    parser.add_argument("--tokens", type=int, default=64)
    run(parser, measure)
