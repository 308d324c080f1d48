"""What stopping between rounds of reconsidering saves, counted against running every round, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from decoding.calibration import Span
from decoding.methods.monitored import SOURCE
from decoding.model import ModelPool, Request
from decoding.monitors.enough import EnoughMonitor, entropy_nats
from decoding.text import codec_of, continuation_ids
from training.length_data import Source
from training.length_predictors import Advance
from training.question_runs import ratio
from turnout.registry import get_method
from turnout.types import Token

NEVER = -1.0  # nats; no entropy is so low
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Round:
    """One round of an answer.

    Attributes:
        entropy: its mean, nats.
        tokens: of the round, with the words put before it.
        right: whether what stands after it is.
    """

    entropy: float
    tokens: int
    right: bool


@dataclass(frozen=True, slots=True)
class Savings:
    """A threshold against running every round, each with its 95% interval over the questions.

    Attributes:
        saved: share of the tokens of all rounds that were not written.
        accuracy: of what stands where the gate stops.
        accuracy_all: of what stands after all rounds.
        difference: of the two, question by question; below 0 the gate does worse.
        rounds: mean number of rounds.
    """

    saved: Span
    accuracy: Span
    accuracy_all: Span
    difference: Span
    rounds: float


async def all_rounds(
    models: ModelPool,
    source: Source,
    asked: list[int],
    is_right: Callable[[int, tuple[int, ...]], bool],
    top: int,
    rounds: int,
    cue: str,
    advance: Advance = lambda *_: None,
) -> list[list[Round]]:
    """Let the large model answer, and reconsider as often as it may, whatever its entropy.

    A gate that stops after some round has written the same up to there: one run tells of every threshold.

    Args:
        models: the large one answers.
        source: what is asked; its `max_tokens` is for each round.
        asked: which of the prompts.
        is_right: whether the tokens of all rounds so far, of a prompt, end in the right answer.
        top: most probable tokens the entropy is taken over.
        rounds: the first answer's included.
        cue: words before each further round.
        advance: called with progress.

    Returns:
        For each prompt its rounds; fewer than `rounds` where the answer ran out of tokens.
    """
    words = len(continuation_ids(codec_of(models, "cue"), cue))
    sampling = source.sampling
    most = sampling.max_tokens * rounds + words * (rounds - 1)
    info = get_method("monitored")
    monitor = {"name": EnoughMonitor.name, "threshold": NEVER, "rounds": rounds, "cue": cue, "top": top}
    params = info.parse({"inner": {"name": "plain", "model": "large"}, "monitor": monitor})

    async def one(index: int) -> list[Round]:
        seq = source.sequence(index)
        seq.sampling = sampling.model_copy(update={"logprobs": top, "max_tokens": most})
        try:
            async with aclosing(info.run(Request(f"rounds-{index}", seq), models, params)) as segments:  # type: ignore[type-var]
                async for _ in segments:
                    pass
        finally:
            models.large.release(seq)
        written = seq.generated
        pairs = enumerate(pairwise(written), start=1)
        starts = [0, *(place for place, (before, each) in pairs if _injected(each) and not _injected(before))]
        found = []
        for start, end in zip(starts, [*starts[1:], len(written)], strict=True):
            own = [entropy_nats(token.top[:top]) for token in written[start:end] if not _injected(token)]
            if own:
                right = is_right(index, tuple(token.id for token in written[:end]))
                found.append(Round(sum(own) / len(own), end - start, right))
        return found

    made: list[list[Round]] = []
    for start in range(0, len(asked), AT_ONCE):
        made += await asyncio.gather(*(one(index) for index in asked[start : start + AT_ONCE]))
        advance("reconsidering", len(made), len(asked))
    return made


def savings(answers: list[list[Round]], threshold: float, seed: int = 0) -> Savings:
    """What a threshold does to answers of which every round is known.

    Args:
        answers: at least one, each with at least one round.
        threshold: nats; an answer stands after the first round at or below it.
        seed: of the intervals.
    """
    kept = [_until(rounds, threshold) for rounds in answers]
    every = np.array([float(sum(each.tokens for each in rounds)) for rounds in answers])
    spent = np.array([float(sum(each.tokens for each in rounds)) for rounds in kept])
    right = np.array([float(rounds[-1].right) for rounds in kept])
    last = np.array([float(rounds[-1].right) for rounds in answers])
    ones = np.ones(len(answers))
    return Savings(
        ratio(every - spent, every, seed),
        ratio(right, ones, seed),
        ratio(last, ones, seed),
        ratio(right - last, ones, seed),
        float(np.mean([len(rounds) for rounds in kept])),
    )


def _until(rounds: list[Round], threshold: float) -> list[Round]:
    """The rounds that a gate lets run."""
    stop = next((place for place, each in enumerate(rounds, start=1) if each.entropy <= threshold), len(rounds))
    return rounds[:stop]


def _injected(token: Token) -> bool:
    return token.source == SOURCE
