"""Examples for judge decoding without annotators: which of the draft's tokens change the target's final answer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from decoding.model import ModelPool, ReadSpec
from decoding.text import TextCodec
from training.data.problem import final_answer
from training.length_data import Examples, Source
from training.state_heads import examples_of
from turnout.types import Token

AnswerOf = Callable[[tuple[int, ...]], str]


def final_answers(codec: TextCodec) -> AnswerOf:
    """What an answer comes to: what stands after its last answer mark, the whole text where there is none."""

    def answer_of(tokens: tuple[int, ...]) -> str:
        text = codec.decode(tokens)
        return final_answer(text) or text.strip()

    return answer_of


async def mine_judgements(models: ModelPool, source: Source, index: int, answer_of: AnswerOf, most: int) -> Examples:
    """Disagreements of draft and target, with whether the draft's token would have been right (paper #175).

    The procedure of AutoJudge: at the first place where the draft says something else than the target, the draft's
    token is forced and the target finishes. Where its final answer stays the same the token is right, and mining
    continues in the changed answer; else it is wrong, and mining continues behind it in the old answer. The example is
    the target's hidden state at the forced token.

    Args:
        models: small drafts, large answers, both with the same noise: a token is a disagreement where match would
            reject it.
        source: the prompts.
        index: which of them.
        answer_of: what the tokens of an answer come to.
        most: disagreements looked at.
    """
    states: list[torch.Tensor] = []
    labels: list[float] = []
    answer, _ = await _finish(models, source, index, ())
    place = 0
    while len(states) < most:
        drafted = await _drafts(models, source, index, answer)
        place = next((at for at in range(place, len(answer)) if drafted[at] != answer[at]), len(answer))
        if place == len(answer):
            break
        changed, state = await _finish(models, source, index, (*answer[:place], drafted[place]))
        same = answer_of(changed) == answer_of(answer)
        states.append(state)
        labels.append(float(same))
        answer = changed if same else answer
        place += 1
    return examples_of(states, labels, index)


async def _drafts(models: ModelPool, source: Source, index: int, answer: tuple[int, ...]) -> list[int]:
    """What the draft says at each place of an answer."""
    seq = source.sequence(index)
    try:
        return [row.token for row in await models.small.extend(seq, answer[:-1], ReadSpec(), every=True)]
    finally:
        models.small.release(seq)


async def _finish(
    models: ModelPool, source: Source, index: int, forced: tuple[int, ...]
) -> tuple[tuple[int, ...], torch.Tensor]:
    """The target's answer that begins with these tokens, and its hidden state [hidden] at the last of them."""
    seq, large = source.sequence(index), models.large
    try:
        seq.extend((Token(token, large.name) for token in forced), {large.name: large.num_parameters})
        [row] = await large.extend(seq, want=ReadSpec(draw=None, hidden=frozenset({-1})))
        await large.decode(seq)
        return tuple(token.id for token in seq.generated), row.hidden[-1]
    finally:
        large.release(seq)
