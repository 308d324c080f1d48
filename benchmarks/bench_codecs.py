"""Codecs of the shared prefix store on the demo pair: bytes, speed, and what they do to answers.

A prompt's keys and values go through a codec chunk by chunk, as they would through the store, and are written into the
cache of a fresh sequence; what a partial chunk leaves, and at least one token, is computed. The answer from there on is
compared with the one after the codec `raw`, which went the same way: next-token distributions along raw's greedy
answer, and the greedy answer itself. Prompts are held-out problems alone and after worked examples. The cache holds
bfloat16 numbers; models compute in float32, so that nothing but the codec makes a difference.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Cell, Report, command_line, note, run, shown
from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.cache.table import BlockTable
from engine.model import EngineModel
from experiments.stats.intervals import wilson
from kvstore.base import ChunkShape, Codec
from kvstore.codecs.base import codec_numbers, filled_up, load_codec
from kvstore.profiles import read_profiles
from pool.local_pool import LocalPool
from training.data import arithmetic, lists
from training.data.problem import Problem
from training.kv_profiles import read_kv
from turnout.calls import ChatMessage
from turnout.config import TurnoutConfig, artifacts_path
from turnout.types import SamplingParams

DEMO_ONLY = "codecs use the profiles of the demo pair, and answers are judged on its tasks"
AT_ONCE = 20  # prompts
MAX_TOKENS = 140
SPEED_TOKENS = 256
GOAL_RATIO, GOAL_LOSS = 3.5, 0.01
JUDGED = "short"  # the set that the goal is for: on longer ones the demo models are at a loss themselves


@dataclass(frozen=True)
class Set:
    """Prompts of a kind.

    Attributes:
        examples: worked ones before the problem.
        chunk_tokens: of the chunks that go through the codec.
        share: of the problems that are used.
    """

    examples: int
    chunk_tokens: int
    share: float


SETS = {"short": Set(0, 16, 1.0), "long": Set(2, 32, 0.5), "many": Set(8, 128, 0.1)}


@dataclass(frozen=True)
class Case:
    """A prompt's ids, and what it asks."""

    prompt: list[int]
    problem: Problem


@dataclass
class Quality:
    """Comparison of answers after a codec with those after raw, over one set of prompts.

    Attributes:
        prompts: how many.
        same: those whose greedy answer is the same, token for token.
        right: those whose answer is right.
        kl: mean divergence of next-token distributions from raw's, nats a token.
        ratio: bytes of the chunks over those that are stored of them.
    """

    prompts: int
    same: int
    right: int
    kl: float
    ratio: float


@dataclass
class Line:
    """One codec on one model.

    Attributes:
        encode_gbps: 10^9 bytes of keys and values a second, one thread, chunks of 256 tokens.
        decode_gbps: likewise.
        sets: by kind of prompt.
    """

    model: str
    codec: str
    encode_gbps: float
    decode_gbps: float
    sets: dict[str, Quality] = field(default_factory=dict)


def problems(count: int, seed: int) -> list[Problem]:
    """Held-out problems of all grades alike, three of arithmetic for one on lists."""
    found: list[Problem] = []
    for kind, share in ((arithmetic, 3), (lists, 1)):
        each = -(-count * share // 4 // len(kind.DIFFICULTIES))
        found += [problem for grade in kind.DIFFICULTIES for problem in kind.heldout(grade, each, seed=seed)]
    return random.Random(seed).sample(found, min(count, len(found)))


def messages(problem: Problem, examples: int, rng: random.Random) -> list[ChatMessage]:
    """A conversation that ends with the problem, after a number of worked ones."""
    turns = []
    for _ in range(examples):
        kind = lists if problem.task != arithmetic.TASK else arithmetic
        shown = kind.draw_training(rng, problem.difficulty)
        turns += [ChatMessage("user", shown.prompt), ChatMessage("assistant", shown.answer)]
    return [*turns, ChatMessage("user", problem.prompt)]


def shape_of(kv: torch.Tensor, tokens: int) -> ChunkShape:
    """Of chunks of `length` tokens of kv [layers, n, 2, kv_heads, head_dim]."""
    return ChunkShape(0, len(kv), tokens, kv.shape[3], kv.shape[4], kv.dtype)


def round_trip(codec: Codec, kv: torch.Tensor, tokens: int) -> tuple[torch.Tensor, int, int]:
    """The full chunks of kv after the codec, their bytes before it, and as they are stored."""
    shape, decoded, encoded = shape_of(kv, tokens), [], 0
    for start in range(0, kv.shape[1] // tokens * tokens, tokens):
        payload = codec.encode(kv[:, start : start + tokens].contiguous(), shape)
        out = torch.empty(shape.size, dtype=shape.dtype)
        codec.decode(memoryview(bytearray(payload)), shape, out)
        decoded.append(out)
        encoded += filled_up(codec, shape, payload).nbytes
    whole = torch.cat(decoded, 1) if decoded else kv[:, :0]
    return whole, len(decoded) * shape.raw_bytes, encoded


@torch.inference_mode()
def seeded(model: EngineModel, prompt: list[int], kv: torch.Tensor, sampling: SamplingParams, ends: Any) -> Sequence:
    """A sequence that finds the keys and values of its first tokens in the cache."""
    seq = Sequence(prompt, sampling, 0, ends)
    table = model.batcher.tables[seq] = BlockTable(seq, model.pool, model.store)
    num = kv.shape[1]
    table.reserve(num)
    slots = torch.tensor(table.slots(0, num), dtype=torch.int64)
    for layer, values in zip(model.store.layers, kv, strict=True):
        layer.index_copy_(0, slots, values.to(layer.dtype))
    table.filled(prompt[:num])
    return seq


class Judge:
    """Answers after codecs, of one model.

    Args:
        pool: what it belongs to.
        role: which model of it.
    """

    def __init__(self, pool: LocalPool, role: str) -> None:
        self.model = pool.engines[pool.roles[role]]
        self._pool = pool
        self._sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

    def cases(self, asked: list[Problem], examples: int) -> list[Case]:
        """Prompts of problems, each after a number of worked examples."""
        rng, encode = random.Random(f"codecs-{examples}"), self._pool.tokenizer.encode_chat
        return [Case(encode(messages(problem, examples, rng)), problem) for problem in asked]

    async def kv(self, prompt: list[int]) -> torch.Tensor:
        """The model's keys and values of a prompt's tokens but the last, [layers, n, 2, kv_heads, head_dim]."""
        found = await read_kv(self.model, prompt)
        self.model.pool.clear_cached()
        return found.to(torch.bfloat16)

    async def answers(self, cases: list[Case], kvs: list[torch.Tensor]) -> list[list[int]]:
        """Greedy, after keys and values of the prompts' first tokens."""
        ends = self._pool.tokenizer.eos_ids
        seqs = [seeded(self.model, case.prompt, kv, self._sampling, ends) for case, kv in zip(cases, kvs, strict=True)]
        segments = await asyncio.gather(*(self.model.decode(seq) for seq in seqs))
        self._forget(seqs)
        return [[token.id for token in segment.tokens] for segment in segments]

    async def log_probs(
        self, cases: list[Case], kvs: list[torch.Tensor], answers: list[list[int]]
    ) -> list[torch.Tensor]:
        """Of every next token along answers, [tokens, vocabulary] each, in nats."""
        seqs = [seeded(self.model, case.prompt, kv, self._sampling, ()) for case, kv in zip(cases, kvs, strict=True)]
        want = ReadSpec(draw=None, logits=True)
        reading = (
            self.model.extend(seq, tuple(answer[:-1]), want, every=True)
            for seq, answer in zip(seqs, answers, strict=True)
        )
        read = await asyncio.gather(*reading)
        self._forget(seqs)
        return [torch.stack([row.logits for row in rows if row.logits is not None]).log_softmax(-1) for rows in read]

    def is_right(self, case: Case, answer: list[int]) -> bool:
        """Whether the answer's result is the problem's."""
        kind: Any = arithmetic if case.problem.task == arithmetic.TASK else lists
        return bool(kind.is_correct(case.problem, self._pool.tokenizer.decode(answer)))

    def _forget(self, seqs: list[Sequence]) -> None:
        """The next sequences must not find what a codec made of these ones' blocks."""
        for seq in seqs:
            self.model.release(seq)
        self.model.pool.clear_cached()


async def compare(judge: Judge, codecs: list[Codec], cases: list[Case], tokens: int) -> list[Quality]:
    """Every codec over a set of prompts; the first one is what the others are compared with."""
    totals = [Quality(len(cases), 0, 0, 0.0, 0.0) for _ in codecs]
    sizes = np.zeros((len(codecs), 2))
    places = 0
    for start in range(0, len(cases), AT_ONCE):
        some = cases[start : start + AT_ONCE]
        computed = [await judge.kv(case.prompt) for case in some]
        expected: list[list[int]] = []
        reference: list[torch.Tensor] = []
        for place, (codec, total) in enumerate(zip(codecs, totals, strict=True)):
            trips = [round_trip(codec, kv, tokens) for kv in computed]
            sizes[place] += np.array([trip[1:] for trip in trips]).sum(0)
            kvs = [trip[0] for trip in trips]
            got = await judge.answers(some, kvs)
            expected = got if place == 0 else expected
            log_probs = await judge.log_probs(some, kvs, expected)
            reference = log_probs if place == 0 else reference
            total.same += sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
            total.right += sum(judge.is_right(case, answer) for case, answer in zip(some, got, strict=True))
            total.kl += sum(float((p.exp() * (p - q)).sum()) for p, q in zip(reference, log_probs, strict=True))
        places += sum(map(len, expected))
        note(f"{judge.model.name}, chunks of {tokens}: {start + len(some)} of {len(cases)} prompts")
    for total, (before, after) in zip(totals, sizes, strict=True):
        total.kl, total.ratio = total.kl / places, before / after
    return totals


def speeds(codec: Codec, kv: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Encode and decode, 10^9 bytes of kv a second of this thread's own time, median of rounds."""
    shape = shape_of(kv, kv.shape[1])
    out = torch.empty(shape.size, dtype=shape.dtype)
    payload = memoryview(bytearray(codec.encode(kv, shape)))

    def rate(work: Callable[[], object]) -> float:
        took = []
        for _ in range(rounds):
            started = time.thread_time()
            work()
            took.append(time.thread_time() - started)
        return float(shape.raw_bytes / np.median(took) / 1e9)

    return rate(lambda: codec.encode(kv, shape)), rate(lambda: codec.decode(payload, shape, out))


async def measure_lines(names: list[str], count: int, rounds: int, config: TurnoutConfig) -> list[Line]:
    """Every codec on both models of the demo pair."""
    name = next(iter(config.pools))
    pool, lines = LocalPool.load(name, config), []
    try:
        asked = problems(count, seed=6)
        for role in ("large", "small"):
            model = Judge(pool, role)
            profiles = read_profiles(artifacts_path(config.pools[name]), model.model.digest)
            codecs = [load_codec(each, profiles) for each in names]
            sets = {
                kind: model.cases(asked[: max(1, round(each.share * count))], each.examples)
                for kind, each in SETS.items()
            }
            kv = await model.kv([token for case in sets["many"] for token in case.prompt][: SPEED_TOKENS + 1])
            found = [Line(role, each.name, *speeds(each, kv, rounds)) for each in codecs]
            for kind, cases in sets.items():
                for line, quality in zip(
                    found, await compare(model, codecs, cases, SETS[kind].chunk_tokens), strict=True
                ):
                    line.sets[kind] = quality
            lines += found
    finally:
        await pool.close()
    return lines


def page(lines: list[Line], rounds: int) -> Report:
    """A table for each model, then the verdicts."""
    sets = ", ".join(
        f"{kind} ({lines[0].sets[kind].prompts} prompts, {each.examples} worked examples before the problem,"
        f" chunks of {each.chunk_tokens} tokens)"
        for kind, each in SETS.items()
    )
    report = Report(
        "Codecs of the shared prefix store (demo pair)",
        "`make bench-codecs`. Ratio: bytes of bfloat16 over those stored, all included, in chunks of"
        f" {SETS['many'].chunk_tokens} tokens. Speed: 10^9 bytes of keys and values a second of its time, one thread,"
        f" chunks of {SPEED_TOKENS} tokens, median of {rounds}. Each prompt's full chunks go through the codec, the"
        " rest is computed; all is compared with `raw` on the same way. KL: mean over tokens of raw's greedy answers,"
        " nats. Same: greedy answers equal to raw's, token for token. Right: answers with the right result."
        f" Sets: {sets}. The demo models learned from one or two questions at a time: what they say after many is"
        " mostly wrong with `raw` too, and hangs by a thread.",
    )
    columns: dict[str, Callable[[Line], Cell]] = {
        "codec": lambda line: line.codec,
        "ratio": lambda line: shown(line.sets["many"].ratio, 2),
        "encode, GB/s": lambda line: f"{line.encode_gbps:.3g}",
        "decode, GB/s": lambda line: f"{line.decode_gbps:.3g}",
    }
    for kind in SETS:
        columns |= _quality_columns(kind)
    for model in dict.fromkeys(line.model for line in lines):
        report.section(f"The {model} model")
        report.table(model, [line for line in lines if line.model == model], columns)
    report.text("\n".join(_verdict(lines)))
    return report


def _quality_columns(kind: str) -> dict[str, Callable[[Line], Cell]]:
    return {
        f"KL, {kind}": lambda line: f"{line.sets[kind].kl:.1e}",
        f"same, {kind}": lambda line: f"{line.sets[kind].same / line.sets[kind].prompts:.1%}",
        f"right, {kind}": lambda line: f"{line.sets[kind].right / line.sets[kind].prompts:.1%}",
    }


def _verdict(lines: list[Line]) -> list[str]:
    """Whether a level of CacheGen is small enough at a small enough loss, model by model."""
    said = []
    for model in dict.fromkeys(line.model for line in lines):
        raw = next(line for line in lines if line.model == model).sets[JUDGED]
        for line in lines:
            if line.model != model or not line.codec.startswith("cachegen"):
                continue
            found = line.sets[JUDGED]
            apart = wilson(found.prompts - found.same, found.prompts)
            lost = (raw.right - found.right) / found.prompts
            met = "met" if found.ratio >= GOAL_RATIO and lost < GOAL_LOSS else "not met"
            said.append(
                f"- {model}, {line.codec}, {JUDGED}: {found.ratio:.2f}x smaller in chunks of"
                f" {SETS[JUDGED].chunk_tokens}; exact match with the right result {lost:+.2%} lost;"
                f" {apart.value:.2%} of the answers are not raw's word for word [{apart.low:.2%}, {apart.high:.2%}];"
                f" goal ({GOAL_RATIO}x at a loss below {GOAL_LOSS:.0%}) {met}."
            )
    return said


def demo() -> TurnoutConfig:
    """The shipped pair in float32."""
    config = TurnoutConfig.demo()
    models = {name: model.model_copy(update={"dtype": "float32"}) for name, model in config.models.items()}
    return config.model_copy(update={"models": models})


async def measure(options: argparse.Namespace) -> Report:
    """Every codec on both models."""
    torch.set_num_threads(1)
    return page(await measure_lines(options.codecs, options.prompts, options.rounds, demo()), options.rounds)


if __name__ == "__main__":
    known = ["raw", *sorted(name for name in codec_numbers() if name != "raw")]
    parser = command_line(__doc__, Path("docs/results/codecs.md"), rounds=15, demo_only=DEMO_ONLY, prompts=24)
    parser.add_argument("--codecs", nargs="+", choices=known, default=known, help="the first is compared with")
    parser.add_argument("--prompts", type=int, default=400)
    run(parser, measure)
