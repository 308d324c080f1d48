"""Measurements of a draft model in the engine that serves it: accepted tokens, step times, wall clock."""

from __future__ import annotations

import asyncio
import copy
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from decoding.drafters.base import DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.fixed import FixedLength, FixedParams
from decoding.model import Model, ModelPool, Request
from decoding.sequence import Sequence
from decoding.vocabulary import SubVocabulary
from engine.loading import prepare
from engine.model import EngineModel
from training.head_runs import Target
from training.length_data import Source
from turnout.config import EngineConfig, ModelConfig
from turnout.cost import SpeculationMeter
from turnout.registry import get_method
from turnout.types import SamplingParams, Sharing

DRAFT_CACHE_BYTES = 64 << 20
CONTEXT = 128  # tokens before the forwards that are timed
REPEATS = 5


@dataclass(frozen=True)
class Acceptance:
    """Outcome of speculation on held-out prompts under the engine's own verifier.

    Attributes:
        accepted: mean accepted tokens of a chain.
        by_depth: share of drafted tokens at each depth that were accepted.
        rounds: chains verified; rounds with no room for a draft are left out.
    """

    accepted: float
    by_depth: list[float]
    rounds: int

    @classmethod
    def of(cls, meter: SpeculationMeter) -> Acceptance:
        """Read a meter."""
        chains = meter.drafted_at[0] if meter.drafted_at else 0
        return cls(meter.accepted_tokens / max(1, chains), [float(each) for each in meter.acceptance], chains)


class DraftEngine:
    """A student in the engine, next to its target. Close it before another is made.

    Args:
        target: the target, loaded.
        student: a Hugging Face model; copied.
        kept: ids of its head.
        engine: settings of the engine.
    """

    def __init__(self, target: Target, student: Any, kept: torch.Tensor, engine: EngineConfig) -> None:
        self._target = target
        served = type(student)(copy.deepcopy(student.config))  # the engine changes both
        served.load_state_dict(student.state_dict())
        checkpoint = prepare(served.to(target.model.dtype), engine.kernels, exact=lambda: student)
        checkpoint.draft_vocabulary = SubVocabulary(kept)
        settings = ModelConfig(path="draft", kv_memory_bytes=DRAFT_CACHE_BYTES)
        self.model = EngineModel("draft", checkpoint, settings, engine, target.model.batcher.device)
        models: dict[str, Model] = {"large": target.model, "draft": self.model}
        self._pool = ModelPool(models, {"small": "draft", "large": "large"}, target.tokenizer)

    async def close(self) -> None:
        """Give back what it holds; the target stays."""
        await self.model.close()

    async def acceptance(self, source: Source, depth: int) -> Acceptance:
        """Answer all prompts at once by chains of `depth`, verified by match."""
        meter = SpeculationMeter()
        params = {"drafter": "model_chain", "length": "fixed", "draft_length": depth}
        answering = (self._speculate(source, index, params) for index in range(len(source.prompts)))
        for seq in await asyncio.gather(*answering):
            meter.merge(seq.meter.speculation)
        return Acceptance.of(meter)

    async def wall_clock(self, source: Source, depth: int, most: int) -> dict[str, float]:
        """Tokens per second of the first prompts, one at a time: plain, by chains of `depth`, and by `smartspec`."""
        chosen = range(min(most, len(source.prompts)))
        ways: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "chain": {"drafter": "model_chain", "length": "fixed", "draft_length": depth},
            "smartspec": {"drafter": "model_chain", "length": "smartspec"},
        }
        seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        for index in chosen:
            for name, params in ways.items():  # in turn, so that a change of the machine's load meets all
                started = perf_counter()
                seq = await self._speculate(source, index, params, Sharing.private(f"{name} {index}"))
                seconds[name] += perf_counter() - started
                tokens[name] += len(seq.generated)
        return {name: tokens[name] / seconds[name] for name in ways}

    async def _speculate(
        self, source: Source, index: int, params: dict[str, Any] | None, sharing: Sharing | None = None
    ) -> Sequence:
        """Answer one prompt, for `params` None plainly; `sharing` says which cached prompts it may use."""
        seq = source.sequence(index)
        if sharing is not None:
            seq.sharing = sharing
        try:
            if params is None:
                await self._target.model.decode(seq)
                return seq
            method = get_method("speculative")
            request = Request(f"draft {index}", seq)
            async with aclosing(method.run(request, self._pool, method.parse(params))) as segments:  # type: ignore[type-var]
                async for _ in segments:
                    pass
        finally:
            self.model.release(seq)
            self._target.model.release(seq)
        return seq

    async def row_seconds(self, depth: int) -> float:
        """Time of a drafted token, with the trimmed head: the median of several chains."""
        drafter, length = ModelChainDrafter(), FixedLength(FixedParams(most=depth))
        times = []
        seq = _context(self.model)
        try:
            for _ in range(REPEATS + 1):  # the first one reads the context
                started = perf_counter()
                tree = await self.model.propose(seq, drafter, DraftBudget(depth, depth), length)
                times.append((perf_counter() - started) / max(1, len(tree)))
        finally:
            self.model.release(seq)
        return sorted(times[1:])[REPEATS // 2]


async def forward_seconds(model: EngineModel, rows: int) -> float:
    """Time of a forward of `rows` tokens after a context: the median of several."""
    times = []
    seq = _context(model)
    try:
        for _ in range(REPEATS + 1):
            started = perf_counter()
            await model.extend(seq, tuple([1] * (rows - 1)))
            times.append(perf_counter() - started)
    finally:
        model.release(seq)
    return sorted(times[1:])[REPEATS // 2]


def _context(model: EngineModel) -> Sequence:
    tokens = [index % model.vocab_size for index in range(min(CONTEXT, model.max_length // 2))]
    return Sequence(tokens, SamplingParams(temperature=0.0, max_tokens=64), 0)
