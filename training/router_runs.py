"""Making outcomes: both models of a pool answer questions, and something tells who was right."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from decoding.candidates import final_answer
from decoding.model import Model
from decoding.noise import derive_seed
from decoding.recorder import watched
from decoding.sequence import Sequence
from pool.endpoints.text_pool import TextPool
from pool.local_pool import LocalPool
from router.summary import read_log
from training.agreement import agreement
from training.calibration_data import DEMO, Judge, is_right, read_questions
from training.data.problem import Problem
from training.router_outcomes import ROLES, Asked, Outcome, Outcomes, Role, Sample
from training.router_training import Advance
from turnout.calls import Chunk, GenerateCall, Usage
from turnout.errors import TurnoutError, invalid
from turnout.types import MAX_SEED, SamplingParams

# In the order of the questions, by which each has its seed.
KINDS = ("arithmetic", "lists", "passages", "templates", "edits")
AT_ONCE = 8
SHIPPED_COUNT, SHIPPED_SEED = 4000, 0  # the most questions that `make train-routers` asks, and their seed
DIGITS = 4  # what lies beyond them depends on which answers shared a forward


@dataclass(frozen=True)
class Question:
    """A question of some kind, and what tells from 0 to 1 how good an answer to it is.

    Without a judge an answer is as good as it agrees with the large model, whose own is right.
    """

    kind: str
    asked: Asked
    judge: Judge | None


def questions(count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> list[Question]:
    """About `count` problems that the demo models were not trained on, as many of each kind and grade.

    Args:
        count: how many; rounded up to a multiple of kinds and grades.
        seed: other seeds give other problems.
        kinds: names in `KINDS`.
    """
    found = []
    for kind in kinds:
        for problem in _problems(kind, -(-count // len(kinds)), seed):
            name = f"{kind} {problem.difficulty}"
            found.append(Question(name, Asked(prompt=problem.prompt), partial(is_right, DEMO[kind], problem)))
    return _unique(found)


@cache
def asked_for_shipped(kind: str) -> frozenset[str]:
    """Keys of the problems that the routers of the demo pair learnt from: who measures them asks others.

    Args:
        kind: a name in `KINDS`.
    """
    return frozenset(problem.key for problem in _problems(kind, SHIPPED_COUNT // len(KINDS), SHIPPED_SEED))


def _problems(kind: str, count: int, seed: int) -> list[Problem]:
    """Of one kind, as many of each grade."""
    data = DEMO[kind]
    each = -(-count // len(data.DIFFICULTIES))
    return [problem for difficulty in data.DIFFICULTIES for problem in data.heldout(difficulty, each, seed=seed)]


def file_questions(path: Path, count: int | None = None) -> list[Question]:
    """Questions of a file as for `turnout calibrate`: JSON objects with `prompt`, `answer` and perhaps `match`.

    Args:
        path: the file.
        count: only the first `count`.

    Raises:
        TurnoutError: INVALID_ARGUMENT: unreadable, a row at fault, or rows without an answer.
    """
    found = read_questions(path, count).questions
    if any(each.judge is None for each in found):
        raise invalid("data", f"{path.name} has rows without answer, which tells who is right; give all of them one")
    return _unique([Question(path.stem, Asked(prompt=each.prompt), each.judge) for each in found])


@dataclass(frozen=True)
class Logged:
    """What a route log has to learn from.

    Attributes:
        questions: what was asked, each once, as it was asked last; without judges.
        passed_over: requests with tools, or with token ids for a prompt.
    """

    questions: list[Question]
    passed_over: int


def logged_questions(paths: list[Path], pool: str, count: int | None = None) -> Logged:
    """What a pool was asked, from its route log.

    Args:
        paths: files of the log.
        pool: whose requests.
        count: only the last `count`.

    Raises:
        TurnoutError: INVALID_ARGUMENT: unreadable, no entry of the pool, or a log without texts.
    """
    found, passed_over = list[Question](), 0
    for path in paths:
        for entry in read_log(path):
            if entry["kind"] != "request" or entry.get("pool", pool) != pool:
                continue
            if "request" not in entry:
                raise invalid("log", f"{path} holds no texts: set routing.log.texts, and let it fill anew")
            asked = asked_in(entry["request"])
            if asked is None:
                passed_over += 1
            else:
                found.append(Question("log", asked, None))
    if not found:
        said = f" but {passed_over} with tools or token ids" if passed_over else ""
        raise invalid("log", f"{', '.join(map(str, paths))}: no request to pool {pool!r}{said}")
    return Logged(_unique(found[::-1])[: count or len(found)], passed_over)


def asked_in(body: dict[str, Any]) -> Asked | None:
    """What a logged request asked; None where it was asked with tools, or with token ids for a prompt."""
    if "tools" in body:
        return None
    try:
        return Asked(messages=body["messages"]) if "messages" in body else Asked(text=body.get("prompt"))
    except (ValidationError, TurnoutError):
        return None


def _unique(found: list[Question]) -> list[Question]:
    """Everything asked once: the last of the questions that share it."""
    return list({question.asked.key: question for question in found}.values())


async def run_outcomes(
    pool: LocalPool | TextPool,
    asked: list[Question],
    sampling: SamplingParams,
    samples: int,
    seed: int,
    advance: Advance,
) -> Outcomes:
    """Let both models answer every question, `AT_ONCE` questions at a time.

    Args:
        pool: whose models answer, each alone; endpoints' answers need questions with a judge.
        asked: the questions.
        sampling: how they answer.
        samples: answers of each model to each question.
        seed: of the noise; every answer's is derived from it.
        advance: called with progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a question has no judge; or as `TextPool.generate`.
    """
    slots, done = asyncio.Semaphore(AT_ONCE), 0
    if isinstance(pool, TextPool) and any(question.judge is None for question in asked):
        name = next(iter(pool.model_pool.elsewhere))
        raise invalid("log", f"tells not who is right, and the tokens of {name!r}, an endpoint, cannot be compared;"
                      " give --data, with answers")  # fmt: skip

    async def answers(role: Role, question: Question, number: int) -> tuple[Sample, ...]:
        given = (role, question, sampling, samples, derive_seed(seed, number))
        return await (_text_samples(pool, *given) if isinstance(pool, TextPool) else _samples(pool, *given))

    async def one(number: int, question: Question) -> Outcome:
        nonlocal done
        async with slots:
            found = {role: await answers(role, question, number) for role in ROLES}
        done += 1
        advance("answering", done, len(asked))
        return Outcome(
            **question.asked.model_dump(),
            samples_small=found["small"],
            samples_large=found["large"],
            kind=question.kind,
        )

    rows = await asyncio.gather(*(one(number, question) for number, question in enumerate(asked)))
    return Outcomes.of(rows, {role: pool.model_pool.digest_of(role) for role in ROLES})


async def _samples(
    pool: LocalPool, role: Role, question: Question, sampling: SamplingParams, samples: int, seed: int
) -> tuple[Sample, ...]:
    prompt = question.asked.encode(pool.tokenizer)
    model = pool.model_pool.by_role(role)

    async def one(index: int) -> Sample:
        seq = Sequence(prompt, sampling, derive_seed(seed, index), pool.tokenizer.eos_ids)
        return await _answer(pool, model, seq, question)

    first = await one(0)  # computes the prompt, which the others find in the cache
    return (first, *await asyncio.gather(*(one(index) for index in range(1, samples))))


async def _text_samples(
    pool: TextPool, role: Role, question: Question, sampling: SamplingParams, samples: int, seed: int
) -> tuple[Sample, ...]:
    """As `_samples`, of a model that is asked as callers ask it."""
    judge = question.judge
    assert judge is not None

    async def one(index: int) -> Sample:
        seeded = sampling.model_copy(update={"seed": derive_seed(seed, index) % MAX_SEED})
        text = question.asked.text
        given = {"messages": question.asked.turns} if text is None else {"prompt": text}
        call = GenerateCall(f"outcome-{seed}-{index}", pool.model_pool.roles[role], seeded, **given)
        answer, tokens = "", 0
        async with aclosing(pool.generate(call)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Chunk):
                    answer += event.text
                elif isinstance(event, Usage):
                    tokens = event.completion_tokens
        return Sample(reward=judge(answer), tokens=max(tokens, 1), answer=final_answer(answer))

    return tuple(await asyncio.gather(*(one(index) for index in range(samples))))


async def _answer(pool: LocalPool, model: Model, seq: Sequence, question: Question) -> Sample:
    try:
        tokens = (await model.decode(seq, watched())).tokens
    finally:
        model.release(seq)
    text = pool.tokenizer.decode([token.id for token in seq.generated if token.id not in seq.end_ids])
    entropies = [token.entropy_bits or 0.0 for token in tokens]
    logprobs = [token.logprob or 0.0 for token in tokens]
    return Sample(
        reward=await _reward(pool, model, seq, question, text),
        tokens=len(tokens),
        entropy_bits=max(round(sum(entropies) / len(tokens), DIGITS), 0.0),
        logprob=min(round(sum(logprobs) / len(tokens), DIGITS), 0.0),
        answer=final_answer(text),
    )


async def _reward(pool: LocalPool, model: Model, seq: Sequence, question: Question, text: str) -> float:
    if question.judge is not None:
        return question.judge(text)
    large = pool.model_pool.large
    return 1.0 if model is large else await agreement(large, seq)
