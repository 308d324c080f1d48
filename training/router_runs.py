"""Making outcomes: both models of a pool answer questions whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from decoding.model import Model
from decoding.noise import derive_seed
from decoding.sequence import Sequence
from decoding.watching import watched
from engine.pool import LocalPool
from training.data import arithmetic, edits, lists, passages, templates
from training.data.problem import Problem
from training.router_outcomes import ROLES, Outcome, Outcomes, Role, Sample
from training.router_training import Advance
from turnout.calls import ChatMessage
from turnout.types import SamplingParams

Checker = Callable[[Problem, str], bool]

KINDS: dict[str, ModuleType] = {
    "arithmetic": arithmetic,
    "lists": lists,
    "passages": passages,
    "templates": templates,
    "edits": edits,
}
AT_ONCE = 8
DIGITS = 4  # what lies beyond them depends on which answers shared a forward


@dataclass(frozen=True)
class Question:
    """A problem of some kind, and who can tell whether an answer to it is right."""

    kind: str
    problem: Problem
    is_correct: Checker


def questions(count: int, seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Question]:
    """About `count` problems that the demo models were not trained on, as many of each kind and grade.

    Args:
        count: how many; rounded up to a multiple of kinds and grades.
        seed: other seeds give other problems.
        kinds: names in `KINDS`.
    """
    found = []
    for kind in kinds:
        data = KINDS[kind]
        each = -(-count // (len(kinds) * len(data.DIFFICULTIES)))
        for difficulty in data.DIFFICULTIES:
            problems: list[Problem] = data.heldout(difficulty, each, seed=seed)
            found += [Question(f"{kind} {difficulty}", problem, data.is_correct) for problem in problems]
    unique = {question.problem.prompt: question for question in found}
    return list(unique.values())


async def run_outcomes(
    pool: LocalPool, asked: list[Question], sampling: SamplingParams, samples: int, seed: int, advance: Advance
) -> Outcomes:
    """Let both models answer every question, `AT_ONCE` questions at a time.

    Args:
        pool: whose models answer, each alone.
        asked: the questions.
        sampling: how they answer.
        samples: answers of each model to each question.
        seed: of the noise; every answer's is derived from it.
        advance: told of progress.
    """
    slots, done = asyncio.Semaphore(AT_ONCE), 0

    async def one(number: int, question: Question) -> Outcome:
        nonlocal done
        async with slots:
            found = {
                role: await _samples(pool, role, question, sampling, samples, derive_seed(seed, number))
                for role in ROLES
            }
        done += 1
        advance("answering", done, len(asked))
        return Outcome(
            prompt=question.problem.prompt,
            samples_small=found["small"],
            samples_large=found["large"],
            kind=question.kind,
        )

    return Outcomes.of(await asyncio.gather(*(one(number, question) for number, question in enumerate(asked))))


async def _samples(
    pool: LocalPool, role: Role, question: Question, sampling: SamplingParams, samples: int, seed: int
) -> tuple[Sample, ...]:
    prompt = pool.tokenizer.encode_chat([ChatMessage("user", question.problem.prompt)])
    model = pool.pool.role(role)

    async def one(index: int) -> Sample:
        seq = Sequence(prompt, sampling, derive_seed(seed, index), pool.tokenizer.eos_ids)
        return await _answer(pool, model, seq, question)

    first = await one(0)  # computes the prompt, which the others find in the cache
    return (first, *await asyncio.gather(*(one(index) for index in range(1, samples))))


async def _answer(pool: LocalPool, model: Model, seq: Sequence, question: Question) -> Sample:
    try:
        tokens = (await model.decode(seq, watched())).tokens
    finally:
        model.release(seq)
    text = pool.tokenizer.decode([token.id for token in tokens if token.id not in seq.end_ids])
    entropies = [token.entropy_bits or 0.0 for token in tokens]
    logprobs = [token.logprob or 0.0 for token in tokens]
    return Sample(
        reward=float(question.is_correct(question.problem, text)),
        tokens=len(tokens),
        entropy_bits=max(round(sum(entropies) / len(tokens), DIGITS), 0.0),
        logprob=min(round(sum(logprobs) / len(tokens), DIGITS), 0.0),
    )
