"""Cost of a structure: decode speed of answers held to it, against free answers.

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
OBJECTS = "list of objects"
AT_ONCE = 8  # requests of one kind after the other
SENTENCE = "The small model wrote a list of short words that few would read before the end came. "
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

# One structure of each other kind, for which answers are as long as they may be wherever the kind allows it.
KINDS: dict[str, dict[str, Any]] = {
    "json_object": {"json_object": True},
    "regex": {"regex": "([a-z]{1,9} ){900}"},
    "grammar": {"grammar": 'start: "(" start ")" | item{900}\nitem: "x" | "y" start "z" | / [a-w]{2,8}/'},
    "choice": {"choice": [SENTENCE[first:] + SENTENCE * 20 for first in range(20)]},
    "span": {"span": SENTENCE * 20},
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


async def constraint_of(subject: str, value: dict[str, Any]) -> Constraint:
    """A structure, compiled for a subject's vocabulary."""
    structure = Structure.model_validate(value)
    if subject in VOCABULARIES:
        return Compiler(random_vocabulary(VOCABULARIES[subject])).compile(structure)
    folder = real_model.model_folder() if subject == REAL else open_pair(DEMO).folder("large")
    return await TextTokenizer(folder).structures.made(structure, tenant="bench")


async def decode_speed(
    models: ModelPool, way: str, prompts: list[list[int]], tokens: int, bound: Constraint | None
) -> float:
    """Tokens per second of concurrent requests after their first token; under some structures, answers end early."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    ends = bound.end_ids if bound is not None else ()
    sequences = [Sequence(prompt, sampling, 0, eos_ids=ends) for prompt in prompts]
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
    return sum(len(seq.answer) - 1 for seq in sequences) / elapsed


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
    objects = await constraint_of(subject, {"json_schema": SCHEMA})
    plain = checkpoint_of(subject).to(torch.bfloat16).eval()
    tokens = options.tokens

    async def at(way: str, concurrency: int, models: ModelPool, kind: str, constraint: Constraint) -> Comparison:
        prompts = random_prompts(models.large.vocab_size, concurrency, PROMPT_TOKENS)
        free = Side("free", lambda _: decode_speed(models, way, prompts, tokens, None))
        bound = Side("bound", lambda _: decode_speed(models, way, prompts, tokens, constraint))
        case = {"model": subject, "structure": kind, "decoding": way, "requests": concurrency}
        return await compare(case, (free, bound), options.rounds, GOAL)

    roles, engine = ("small", "large"), EngineConfig(token_budget=1024)
    async with open_engine(*(copy.deepcopy(plain) for _ in roles), names=roles, engine=engine) as made:
        texts = ListText([str(token) for token in range(made[0].vocab_size)])
        models = ModelPool(dict(zip(roles, made, strict=True)), dict(zip(roles, roles, strict=True)), texts)
        rows = [await at(way, many, models, OBJECTS, objects) for way, sizes in WAYS.items() for many in sizes]
        for kind, value in KINDS.items() if options.kinds else ():
            rows.append(await at(PLAIN, AT_ONCE, models, kind, await constraint_of(subject, value)))
        return rows


async def measure(options: argparse.Namespace) -> Report:
    """Every subject, one after the other."""
    report = Report(
        f"What a structure costs (bfloat16, {torch.get_num_threads()} threads)",
        f"`make bench-structure`; prompt {PROMPT_TOKENS} tokens, {options.tokens} generated, greedy, median of"
        f" {options.rounds} alternating rounds [smallest, largest]. Bound: every row masked, to a list of objects by"
        " JSON schema or to a structure of another kind.",
    )
    rows = [row for subject in options.subjects for row in await measure_subject(subject, options)]
    report.comparisons("speeds", rows, "tokens/s", digits=3)
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/structure.md"), rounds=7)
    parser.add_argument("--subjects", nargs="+", choices=NAMES, default=[name for name in NAMES if name != REAL])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kinds", action="store_true", help="one structure of each other kind, too")
    run(parser, measure)
