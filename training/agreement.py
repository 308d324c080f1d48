"""How far a text is the one that the large model would have written."""

from __future__ import annotations

from decoding.model import Model, ReadSpec
from decoding.sequence import Sequence


async def agreement(large: Model, seq: Sequence) -> float:
    """Share of an answer's tokens that the large model would have chosen there itself, with the same noise.

    Args:
        large: reads the answer once; holds nothing of it afterwards.
        seq: with at least one generated token.
    """
    fresh = Sequence(seq.tokens[: seq.num_prompt_tokens], seq.sampling, seq.seed)
    written = tuple(token.id for token in seq.generated)
    try:
        rows = await large.extend(fresh, written, ReadSpec(), every=True)
    finally:
        large.release(fresh)
    return sum(row.token == token for row, token in zip(rows, written, strict=False)) / len(written)
