"""Answering a set of questions in one way, and what it cost and brought, question by question."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decoding.calibration import Span
from decoding.drift import TALLY
from decoding.model import ModelPool, Request
from decoding.noise import derive_seed
from decoding.sequence import Sequence as Tokens
from pool.local_pool import LocalPool
from training.agreement import agreement
from training.calibration_data import Question
from turnout.calls import ChatMessage
from turnout.errors import out_of_range
from turnout.registry import get_method
from turnout.types import SamplingParams

Floats = NDArray[np.float64]
Recorder = Callable[[], Any]

ROUNDS = 2000


@dataclass(frozen=True)
class Run:
    """One way of answering, by question: float64 [questions] each, but for the last two.

    Attributes:
        tokens: generated.
        by_large: written by the large model, dropped ones included.
        paid: parameters times tokens written, those thrown away included, summed over the models.
        flops: of all that was processed.
        quality: from 0 to 1.
        switches: hand-overs.
        tallies: what each question's recorder ended as; None each where there was none.
        wall_s: seconds of each batch of questions answered together.
    """

    tokens: Floats
    by_large: Floats
    paid: Floats
    flops: Floats
    quality: Floats
    switches: Floats
    tallies: list[Any]
    wall_s: Floats

    @property
    def large_share(self) -> float:
        """Tokens the large model wrote per token of the answers; see `turnout.cost.Meter.large_share`."""
        return float(self.by_large.sum() / self.tokens.sum())


@dataclass(frozen=True)
class Bench:
    """Models, and how they are asked.

    Attributes:
        models: the pool.
        encode: a question as prompt ids, ready to be answered.
        decode: text of an answer's ids.
        eos_ids: ids that end an answer.
        sampling: of every answer.
        seed: of what is drawn; the n-th question has the same noise in every run.
        at_once: questions answered together.
        reset: called before each run, so that none finds another's prefixes cached.
    """

    models: ModelPool
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos_ids: frozenset[int]
    sampling: SamplingParams
    seed: int = 0
    at_once: int = 16
    reset: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, pool: LocalPool, sampling: SamplingParams, seed: int, at_once: int = 16, chat: bool = True) -> Bench:
        """A loaded pool; questions are chat messages, or texts to be continued."""
        tokenizer = pool.tokenizer

        def encode(text: str) -> list[int]:
            return tokenizer.encode_chat((ChatMessage("user", text),)) if chat else tokenizer.encode(text)

        def reset() -> None:
            for engine in pool.engines.values():
                engine.pool.clear_cached()

        return cls(
            pool.model_pool, encode, tokenizer.decode, frozenset(tokenizer.eos_ids), sampling, seed, at_once, reset
        )

    def check(self, questions: Sequence[Question]) -> None:
        """Refuse prompts that leave no room for an answer.

        Raises:
            TurnoutError: OUT_OF_RANGE: names the first.
        """
        most = min(model.max_length for model in self.models.models.values()) - self.sampling.max_tokens
        for question in questions:
            length = len(self.encode(question.prompt))
            if not 0 < length <= most:
                where = f"row {question.row}: prompt"
                raise out_of_range("data", f"{where}: {length} tokens; 1 to {most} leave room to answer")

    async def run(
        self, questions: Sequence[Question], method: str, params: dict[str, Any], recorder: Recorder | None = None
    ) -> Run:
        """Answer every question.

        Args:
            questions: in order.
            method: registered name.
            params: its parameters.
            recorder: makes what the method's rule tells entropies to, one a question.
        """
        self.reset()
        requests = [self._request(index, question, recorder) for index, question in enumerate(questions)]
        walls = []
        for start in range(0, len(requests), self.at_once):
            started = time.perf_counter()
            batch = requests[start : start + self.at_once]
            await asyncio.gather(*(self._answer(request, method, params) for request in batch))
            walls.append(time.perf_counter() - started)
        quality = await self._judge(questions, [request.sequence for request in requests])
        return self._collect(requests, quality, walls)

    def _request(self, index: int, question: Question, recorder: Recorder | None) -> Request:
        seq = Tokens(self.encode(question.prompt), self.sampling, derive_seed(self.seed, index + 1), self.eos_ids)
        extra = {} if recorder is None else {TALLY: recorder()}
        return Request(f"calibration-{index}", seq, extra=extra)

    async def _answer(self, request: Request, method: str, params: dict[str, Any]) -> None:
        info = get_method(method)
        try:
            async with aclosing(info.run(request, self.models, info.parse(params))) as segments:  # type: ignore[type-var]
                async for _ in segments:
                    pass
        finally:
            for model in self.models.models.values():
                model.release(request.sequence)

    async def _judge(self, questions: Sequence[Question], answers: list[Tokens]) -> list[float]:
        """Quality of each answer: its judge's, or the share of its tokens that the large model would have chosen."""
        if questions[0].judge is None:
            found: list[float] = []
            for start in range(0, len(answers), self.at_once):
                batch = answers[start : start + self.at_once]
                found += await asyncio.gather(*(agreement(self.models.large, seq) for seq in batch))
            return found
        texts = [self.decode([token.id for token in seq.generated if token.id not in self.eos_ids]) for seq in answers]
        return [question.judge(text) for question, text in zip(questions, texts, strict=True) if question.judge]

    def _collect(self, requests: list[Request], quality: list[float], walls: list[float]) -> Run:
        large = self.models.large.name
        meters = [request.sequence.meter for request in requests]

        def column(read: Callable[[Any], float]) -> Floats:
            return np.array([float(read(meter)) for meter in meters])

        return Run(
            tokens=np.array([float(len(request.sequence.generated)) for request in requests]),
            by_large=column(lambda m: m.written_by(large)),
            paid=column(lambda m: sum(each.paid for each in m.models.values())),
            flops=column(lambda m: sum(each.flops for each in m.models.values())),
            quality=np.array(quality),
            switches=column(lambda m: m.switches),
            tallies=[request.extra.get(TALLY) for request in requests],
            wall_s=np.array(walls),
        )


def paper_cost(run: Run, large_parameters: int, seed: int) -> Span:
    """Parameters that wrote a run's tokens, in vain or not, over those of the large model for those that stayed.

    Args:
        run: whose tokens these are: longer answers cost more by the other meters, not by this one.
        large_parameters: of the large model.
        seed: of the interval.
    """
    return ratio(run.paid, run.tokens * large_parameters, seed)


def ratio(above: Floats, below: Floats, seed: int) -> Span:
    """Sum of one over sum of another, with the percentile bootstrap's 95% interval over their pairs.

    Args:
        above: [n].
        below: [n], with a positive sum.
        seed: of the resampling.
    """
    picks = np.random.default_rng(seed).integers(0, len(above), size=(ROUNDS, len(above)))
    sums = below[picks].sum(axis=1)
    drawn = above[picks].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Span(float(above.sum() / below.sum()), float(low), float(high))
