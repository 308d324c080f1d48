"""Time and memory against the length of the prompt, up to 32,768 tokens, and against requests at once, up to 256.

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

from benchmarks.engines import decode_speed, open_engine, random_prompts
from benchmarks.harness import Report, command_line, note, run, shown
from decoding.model import StopCondition
from decoding.sequence import Sequence
from engine.costs.machine import measure_machine
from engine.costs.resources import ModelShape, Planner
from engine.model import EngineModel
from experiments.process_memory import watched_growth
from experiments.stats.intervals import Interval, spread
from training.random_models import llama_config, random_model
from turnout.config import EngineConfig
from turnout.types import SamplingParams

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
OUTPUT = 17
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT, DECODED = 64, 33  # tokens of prompts and answers of many requests
TURNS = 3
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


@dataclass(frozen=True, slots=True)
class Crowd:
    """Requests that decode at once.

    Attributes:
        requests: at once.
        per_token_s: seconds of the engine for each token, over turns.
    """

    requests: int
    per_token_s: Interval


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


async def decode_together(engine: EngineConfig, counts: list[int]) -> list[Crowd]:
    """Decode after short prompts, at each number of requests, in turns."""
    plain = llama_35m()
    shape = ModelShape.of(plain.config, plain.num_parameters(), torch.bfloat16.itemsize)
    blocks = -(-(SHORT + DECODED) // engine.block_size) * engine.block_size
    needed = max(counts) * blocks * shape.kv_bytes_per_token
    # All keep their cache until the last has ended; a pool holds no more than one step's sequences of this length.
    longest = (SHORT + DECODED) * -(-max(counts) // engine.max_batch)
    speeds: dict[int, list[float]] = {count: [] for count in counts}
    async with open_engine(plain, kv_bytes=needed, max_length=longest, engine=engine) as [model]:
        for _ in range(TURNS + 1):
            for count, found in speeds.items():
                found.append(await decode_speed(model, random_prompts(VOCAB, count, SHORT), DECODED))
    return [Crowd(count, spread([1.0 / each for each in found[1:]])) for count, found in speeds.items()]


async def measure(options: argparse.Namespace) -> Report:
    """Every length once, shortest first, after a warm-up; then every number of requests."""
    lengths, engine = sorted(options.lengths), EngineConfig(token_budget=options.token_budget)
    report = Report(
        f"Growth with context and requests (random Llama, 35 M, bfloat16, {torch.get_num_threads()} threads)",
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
    report.section("Requests at once")
    report.text(
        f"Prompts of {SHORT} tokens, {DECODED} decoded, reading apart; the time of the engine for a token, medians of"
        f" {TURNS} turns [smallest, largest], and for a step, which decodes one of each request."
    )
    note("requests at once")
    crowds = await decode_together(EngineConfig(), sorted(options.requests))
    crowd_columns = {
        "requests": lambda each: each.requests,
        "a token, ms": lambda each: shown(each.per_token_s, 2, 1000),
        "a step, ms": lambda each: shown(each.requests * each.per_token_s.value, 1, 1000),
        "tokens/s": lambda each: shown(1 / each.per_token_s.value),
    }
    report.table("crowds", crowds, crowd_columns)
    report.picture("time of a token over context and over requests", lambda path: plot(readings, crowds, path))
    return report


def plot(readings: list[Reading], crowds: list[Crowd], path: Path) -> None:
    """Draw the time of a token against the context and against requests at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    left.plot([each.length for each in readings], [1e3 * each.per_token_s for each in readings], marker="o")
    left.set_xlabel("tokens before it, one request")
    right.plot([each.requests for each in crowds], [1e3 * each.per_token_s.value for each in crowds], marker="o")
    right.set_xlabel("requests at once, short ones")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylabel("a token, ms")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/long_context.md"), lengths=[1024, 2048], requests=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--token-budget", type=int, default=512)
    run(parser, measure)
