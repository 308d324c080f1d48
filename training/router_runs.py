"""Making outcomes: both models of a pool answer questions whose answers are known."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from decoding.model import Model
from decoding.noise import derive_seed
from decoding.sequence import Sequence
from decoding.watching import watched
from engine.pool import LocalPool
from training.calibration_data import DEMO, Judge, is_right, read_questions
from training.data.problem import Problem
from training.router_outcomes import ROLES, Outcome, Outcomes, Role, Sample
from training.router_training import Advance
from turnout.calls import ChatMessage
from turnout.errors import invalid
from turnout.types import SamplingParams

# In the order of the questions, by which each has its seed.
KINDS = ("arithmetic", "lists", "passages", "templates", "edits")
AT_ONCE = 8
DIGITS = 4  # what lies beyond them depends on which answers shared a forward


@dataclass(frozen=True)
class Question:
    """A question of some kind, and what tells from 0 to 1 how good an answer to it is."""

    kind: str
    prompt: str
    judge: Judge


def questions(count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> list[Question]:
    """About `count` problems that the demo models were not trained on, as many of each kind and grade.

    Args:
        count: how many; rounded up to a multiple of kinds and grades.
        seed: other seeds give other problems.
        kinds: names in `KINDS`.
    """
    found = []
    for kind in kinds:
        data = DEMO[kind]
        each = -(-count // (len(kinds) * len(data.DIFFICULTIES)))
        for difficulty in data.DIFFICULTIES:
            problems: list[Problem] = data.heldout(difficulty, each, seed=seed)
            name = f"{kind} {difficulty}"
            found += [Question(name, problem.prompt, partial(is_right, data, problem)) for problem in problems]
    return _unique(found)


def file_questions(path: Path, count: int | None = None) -> list[Question]:
    """Questions of a file as for `turnout calibrate`: JSON objects with `prompt`, `answer` and perhaps `match`.

    Args:
        path: the file.
        count: only the first so many.

    Raises:
        TurnoutError: INVALID_ARGUMENT: unreadable, a row at fault, or rows without an answer.
    """
    found = read_questions(path, count).questions
    if any(each.judge is None for each in found):
        raise invalid("data", f"{path.name} has rows without answer, which tells who is right; give all of them one")
    return _unique([Question(path.stem, each.prompt, each.judge) for each in found if each.judge is not None])


def _unique(found: list[Question]) -> list[Question]:
    """Each prompt once: the last of the questions that share it."""
    return list({question.prompt: question for question in found}.values())


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
            prompt=question.prompt,
            samples_small=found["small"],
            samples_large=found["large"],
            kind=question.kind,
        )

    return Outcomes.of(await asyncio.gather(*(one(number, question) for number, question in enumerate(asked))))


async def _samples(
    pool: LocalPool, role: Role, question: Question, sampling: SamplingParams, samples: int, seed: int
) -> tuple[Sample, ...]:
    prompt = pool.tokenizer.encode_chat([ChatMessage("user", question.prompt)])
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
        reward=question.judge(text),
        tokens=len(tokens),
        entropy_bits=max(round(sum(entropies) / len(tokens), DIGITS), 0.0),
        logprob=min(round(sum(logprobs) / len(tokens), DIGITS), 0.0),
    )
