"""Examples for a process reward model: steps of worked arithmetic, which the arithmetic itself calls right or wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as Lines

from decoding.model import ModelPool
from decoding.step_heads import STEP_WANT, step_features
from decoding.steps import StepEnd, step_marks, without_end
from decoding.text import TextCodec, continuation_ids, text_within
from training.length_data import Examples, Source
from training.state_heads import HeadRecipe, examples_of

SEPARATORS = ("\n",)


async def mine_steps(
    models: ModelPool, codec: TextCodec, source: Source, index: int, expected: Lines[str], recipe: HeadRecipe
) -> Examples:
    """Features of the small model's steps, and of one of them made wrong (paper #39, RSD).

    The small model answers; its steps are right as long as they are the expected ones, and the first that is not is
    the last example: what a right step after a wrong one would be is not defined. One right step is read once more
    with another digit in its result, as a wrong one, since a good small model makes few mistakes of its own.

    Args:
        models: small writes, the recipe's role reads.
        codec: their tokenizer.
        source: the prompts.
        index: which of them.
        expected: the lines of the worked answer.
        recipe: whose states are read.
    """
    reader = models.by_role(recipe.role)
    seq, again = source.sequence(index), source.sequence(index)
    try:
        segment = await models.small.decode(seq)
        tokens = tuple(token.id for token in segment.tokens)
        rows = await reader.extend(again, tokens, STEP_WANT, every=True)
        states, labels, right = [], [], []
        for place, (start, end) in enumerate(steps_of(models, codec, tokens, seq.end_ids)):
            is_right = place < len(expected) and text_within(codec, tokens[start:end]).strip() == expected[place]
            states.append(step_features(rows[start : end + 1], tokens[start:end]))
            labels.append(float(is_right))
            if not is_right:
                break
            right.append((start, end))
        if right:
            rng = random.Random(f"wrong-step-{source.seed}-{index}")
            start, end = rng.choice(right)
            wrong = continuation_ids(codec, make_wrong(text_within(codec, tokens[start:end]), rng))
            rows = await reader.extend(again, tokens[:start] + wrong, STEP_WANT, every=True)
            states.append(step_features(rows[start:], wrong))
            labels.append(0.0)
    finally:
        for model in (models.small, models.large):
            model.release(seq)
            model.release(again)
    return examples_of(states, labels, index)


def steps_of(
    models: ModelPool, codec: TextCodec, tokens: tuple[int, ...], end_ids: frozenset[int]
) -> list[tuple[int, int]]:
    """Where the steps of an answer begin and end, the token that ends the answer left out."""
    kept = without_end(tokens, end_ids)
    finder = StepEnd(step_marks(codec, models.small.vocab_size, SEPARATORS), SEPARATORS)
    ends = [place for place, token in enumerate(kept, start=1) if finder.feed(token)]
    if kept and (not ends or ends[-1] < len(kept)):
        ends.append(len(kept))
    return list(zip([0, *ends], ends, strict=False))


def make_wrong(step: str, rng: random.Random) -> str:
    """Another digit somewhere in the last number of a step; a step without a number gets one."""
    numbers = list(re.finditer(r"\d+", step))
    if not numbers:
        return f"{step.rstrip()} 1\n"
    number = numbers[-1]
    place = rng.randrange(number.start(), number.end())
    digit = rng.choice([each for each in "0123456789" if each != step[place]])
    return step[:place] + digit + step[place + 1 :]
