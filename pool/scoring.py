"""Log-likelihoods of given completions under one model of a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from decoding.model import Score
from decoding.sequence import Sequence
from pool.embeddings import in_turns
from pool.prefix_stores import shared
from pool.prompt_ids import scored_ids
from pool.text import TextTokenizer
from pool.usage import token_out
from turnout.calls import ScoreCall, ScoredTokens
from turnout.errors import out_of_range
from turnout.types import SamplingParams, Token, TokenKind

if TYPE_CHECKING:
    from engine.member import PoolMember
    from pool.pool import Pool

Scored = tuple[list[int], list[tuple[int, ...]]]  # a prompt, and completions of it


async def scored_groups(pool: Pool, call: ScoreCall, model: PoolMember) -> list[Scored]:
    """Encode a call: prompts with their completions.

    Raises:
        TurnoutError: as `pool.prompt_ids.scored_ids`; OUT_OF_RANGE: a prompt and its completion are too long.
    """
    groups = await scored_ids(call, pool.tokenizer, pool.vocab_size, model.max_length)
    for place, (prompt, completions) in enumerate(groups):
        longest = max(map(len, completions), default=0)
        if len(prompt) + longest > model.max_length:
            most = f"at most {model.max_length}"
            field = f"prompts.{place}" if call.prompts else "prompt"
            raise out_of_range(field, f"with its completion {len(prompt) + longest} tokens; {most}")
    return groups


async def score(pool: Pool, call: ScoreCall, model: PoolMember, groups: list[Scored]) -> list[ScoredTokens]:
    """Score each completion after its prompt.

    Args:
        pool: whose tokens they are.
        call: what is asked for.
        model: which scores.
        groups: of `scored_groups`.
    """

    async def one(group: Scored) -> list[ScoredTokens]:
        prompt, completions = group
        sharing = shared(pool.share, call, prompt)
        # As many tokens as there are: some models compute by how long a sequence may become (`engine.rope`).
        sampling = SamplingParams(temperature=0.0, max_tokens=max(map(len, completions), default=1) or 1)
        low = call.priority == "batch"
        seq = Sequence(prompt, sampling, 0, sharing=sharing, tenant=call.tenant, low_priority=low)
        try:
            scores = await model.score(seq, completions, call.top)
        finally:
            model.release(seq)
        pairs = zip(completions, scores, strict=True)
        return [_scored(pool.tokenizer, model.name, prompt, completion, found) for completion, found in pairs]

    return [each for scored in await in_turns(groups, one) for each in scored]


def _scored(
    tokenizer: TextTokenizer, source: str, prompt: list[int], completion: tuple[int, ...], score: Score
) -> ScoredTokens:
    text = tokenizer.detokenizer(prompt, special=True)
    tokens = [
        token_out(Token(token, source, TokenKind.DECODED, logprob, top=tuple(top)), text)
        for token, logprob, top in zip(completion, score.token_logprobs, score.top, strict=True)
    ]
    if tokens and (rest := text.flush()):
        tokens[-1] = replace(tokens[-1], text=tokens[-1].text + rest)
    return ScoredTokens(tuple(tokens), score.greedy, len(prompt), score.ranks)
