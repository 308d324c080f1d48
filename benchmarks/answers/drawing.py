"""Candidates of a prompt, drawn once as the method `best_of` draws them, for aggregators and estimators to look at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from decoding.aggregators.base import Aggregator, AnswerSet, Candidate
from decoding.aggregators.self_certainty import CertaintyRule
from decoding.candidates import MARK
from decoding.model import ReadSpec, StopCondition
from decoding.noise import derive_seed
from decoding.recorder import Watch
from decoding.sequence import Sequence
from experiments.stats.intervals import Floats
from pool.local_pool import LocalPool
from training.calibration_data import Question
from turnout.calls import ChatMessage
from turnout.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Drawn:
    """Candidates of one prompt.

    Attributes:
        group: all of them, and the sequence that they continue; the first k are those that `best_of` draws for k.
        right: [n] how right each is, from 0 to 1.
        lengths: [n] tokens of each.
    """

    group: AnswerSet
    right: Floats
    lengths: tuple[int, ...]

    def first(self, count: int) -> AnswerSet:
        """The first candidates, to choose from."""
        group = self.group
        return AnswerSet(group.answers[:count], group.seed, group.seq, group.model, group.models)


def new_sequence(pool: LocalPool, prompt: str, sampling: SamplingParams, seed: int) -> Sequence:
    """Make the sequence of an answer to a chat message, as the pool makes it."""
    ids = pool.tokenizer.encode_chat((ChatMessage("user", prompt),))
    return Sequence(ids, sampling, seed, pool.tokenizer.eos_ids)


@asynccontextmanager
async def drawn(
    pool: LocalPool, asked: Question, seed: int, sampling: SamplingParams, count: int, role: str = "large"
) -> AsyncIterator[Drawn]:
    """Draw candidates with the seeds of `best_of`; their memory is freed at the end.

    Args:
        pool: its models.
        asked: the prompt, with a judge.
        seed: of the request.
        sampling: at a temperature above 0.
        count: candidates.
        role: of the model that answers.
    """
    assert asked.judge is not None
    models = pool.model_pool
    model, seq = models.by_role(role), new_sequence(pool, asked.prompt, sampling, seed)
    await model.extend(seq, want=ReadSpec(draw=None))
    forks = [model.fork(seq, derive_seed(seq.seed, index)) for index in range(count)]
    rules = [CertaintyRule() for _ in forks]
    try:
        until = [StopCondition((Watch(), rule)) for rule in rules]
        await asyncio.gather(*(model.decode(*each) for each in zip(forks, until, strict=True)))
        candidates = [Candidate.of(fork, 0, models, MARK, rule) for fork, rule in zip(forks, rules, strict=True)]
        right = np.array([asked.judge(each.text) for each in candidates], dtype=np.float64)
        group = AnswerSet(candidates, seq.seed, seq, model, models)
        yield Drawn(group, right, tuple(len(each.ids) for each in candidates))
    finally:
        for each in (*forks, seq):
            model.release(each)


async def chosen(aggregator: Aggregator, found: Drawn, count: int) -> tuple[int, int]:
    """Choose among the first candidates.

    One that stops early sees those that had ended when it was decided, as if all were written one token a step.

    Returns:
        The place of the choice, and the tokens written until then, discarded ones included.
    """
    lengths = found.lengths[:count]
    if count == 1:
        return 0, lengths[0]
    ended, step = list(range(count)), max(lengths)
    if aggregator.stops_early:
        for step in sorted(set(lengths)):
            ended = sorted((place for place in range(count) if lengths[place] <= step), key=lambda at: lengths[at])
            answers = [found.group.answers[place] for place in ended]
            if len(ended) == count or aggregator.decided(answers, count - len(ended)):
                break
        ended.sort()
    group = found.first(count)
    group.answers = [found.group.answers[place] for place in ended]
    place = ended[await aggregator.choose(group)] if len(ended) > 1 else ended[0]
    return place, sum(min(length, step) for length in lengths)
