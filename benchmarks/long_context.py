"""Time to first token and memory against the length of the prompt, alone on the engine, up to 32,768 tokens.

The model is a Llama of 35 M parameters with random weights in bfloat16. Memory is what the process grew by while
it read the prompt; its KV pool was written to before, so this is working memory, and the cache is counted apart.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import open_engine
from benchmarks.harness import Report, command_line, run, shown
from decoding.model import StopCondition
from decoding.sequence import Sequence
from engine.costs.machine import measure_machine
from engine.costs.resources import ModelShape, Planner
from engine.model import EngineModel
from experiments.process_memory import watched_growth
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig
from turnout.types import SamplingParams

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
OUTPUT = 17
VOCAB = 8192
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """One prompt read, and tokens decoded after it.

    Attributes:
        length: tokens of the prompt.
        first_token_s: seconds to the first token.
        first_token_bound_s: least by the model's arithmetic and the machine's measured speed.
        per_token_s: seconds of each further token.
        kv_bytes: cache of the prompt.
        working_bytes: growth of the process beyond model and cache.
        mask_bytes: what a mask of every pair of positions would take, a byte each.
    """

    length: int
    first_token_s: float
    first_token_bound_s: float
    per_token_s: float
    kv_bytes: int
    working_bytes: int
    mask_bytes: int


def llama_35m() -> Any:
    """8 layers, 8 heads of 64, positions for the longest prompt and its answer."""
    config = llama_config(
        VOCAB,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1792,
        max_position_embeddings=LENGTHS[-1] + OUTPUT,
        pad_token_id=0,
        eos_token_id=1,
    )
    return random_model(config, seed=0).to(torch.bfloat16)


async def read_prompt(model: EngineModel, length: int, planner: Planner) -> Reading:
    """Read one random prompt in chunks, then decode."""
    prompt = torch.randint(2, VOCAB, (length,)).tolist()
    seq = Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True), seed=0)
    with watched_growth() as grown:
        started = time.perf_counter()
        await model.decode(seq, StopCondition(max_tokens=1))
        first = time.perf_counter()
        await model.decode(seq)
        ended = time.perf_counter()
    model.release(seq)
    return Reading(
        length=length,
        first_token_s=first - started,
        first_token_bound_s=planner.prefill_s(length),
        per_token_s=(ended - first) / (OUTPUT - 1),
        kv_bytes=round(planner.kv_bytes(length)),
        working_bytes=grown(),
        mask_bytes=length * length,
    )


async def measure(options: argparse.Namespace) -> Report:
    """Every length once, shortest first, after a warm-up."""
    lengths, engine = sorted(options.lengths), EngineConfig(token_budget=options.token_budget)
    report = Report(
        f"Long prompts (random Llama, 35 M parameters, bfloat16, {torch.get_num_threads()} threads)",
        f"`make bench-long-context`; one request alone, {options.token_budget} tokens a forward. Bound: arithmetic of"
        " the prompt at the speed of torch's matrix product on this machine. Working memory: growth of the process"
        " while it reads and decodes, cache and weights apart. Whole mask: a byte for every pair of positions, which is"
        " never made.",
    )
    plain = llama_35m()
    shape = ModelShape.of(plain.config, plain.num_parameters(), torch.bfloat16.itemsize)
    machine = measure_machine(torch.bfloat16, torch.device("cpu"))
    longest = lengths[-1] + OUTPUT
    needed = -(-longest // engine.block_size) * engine.block_size * shape.kv_bytes_per_token
    async with open_engine(plain, kv_bytes=needed, max_length=longest, engine=engine) as [model]:
        for layer in model.store.layers:
            layer.fill_(0)  # memory of zeros is not taken until it is written to
        planner = Planner(shape, machine)
        await read_prompt(model, lengths[0], planner)
        readings = [await read_prompt(model, length, planner) for length in lengths]
    report.values["machine"] |= asdict(machine)
    columns = {
        "prompt, tokens": lambda each: f"{each.length:,}",
        "first token, s": lambda each: shown(each.first_token_s, 2),
        "bound, s": lambda each: shown(each.first_token_bound_s, 2),
        "prompt tokens/s": lambda each: shown(each.length / each.first_token_s),
        "next token, ms": lambda each: shown(each.per_token_s, 1, 1000),
        "KV cache, MiB": lambda each: shown(each.kv_bytes / MIB),
        "working memory, MiB": lambda each: shown(each.working_bytes / MIB),
        "whole mask, MiB": lambda each: shown(each.mask_bytes / MIB),
    }
    report.table("readings", readings, columns)
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/long_context.md"), lengths=[1024, 2048])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--token-budget", type=int, default=512)
    run(parser, measure)
