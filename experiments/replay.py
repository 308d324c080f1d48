"""An answer compared with the one its request gives alone: equal, or different where rounding may decide, or wrong."""

from __future__ import annotations

from enum import Enum

from decoding.sequence import Sequence
from pool.exactness import TIES, behind
from pool.local_pool import LocalPool
from turnout.calls import Chunk, GenerateCall, TokenOut
from turnout.types import Token

TIE_NATS = TIES["float32"]


class Verdict(Enum):
    """Comparison of two answers to one request."""

    EQUAL = "equal"
    TIE = "tie"
    WRONG = "wrong"


async def answer(pool: LocalPool, call: GenerateCall) -> list[TokenOut]:
    """The tokens of a call's first answer."""
    return [
        token
        async for event in pool.generate(call)
        if isinstance(event, Chunk) and event.index == 0
        for token in event.tokens
    ]


async def compare(
    pool: LocalPool,
    call: GenerateCall,
    got: list[TokenOut],
    alone: list[TokenOut] | None = None,
    tie_nats: float = TIE_NATS,
) -> Verdict:
    """Compare an answer with the one its request gives alone, with nothing cached.

    Where the two part, each token must be the best choice, up to a tie, of the model that claims it: of the large
    one for speculation, whose match verifier takes the large model's own sample.

    Args:
        pool: idle, in float32 unless `tie_nats` says what rounding may do.
        call: with token ids as its prompt, and a seed.
        got: tokens of the answer under load.
        alone: the answer to compare with, where it is known; absent: the call is answered again.
        tie_nats: scores this close may change places.
    """
    for engine in pool.engines.values():
        engine.pool.clear_cached()
    if alone is None:
        alone = await answer(pool, call)
    if [token.id for token in alone] == [token.id for token in got]:
        return Verdict.EQUAL
    place = next((i for i, (a, b) in enumerate(zip(alone, got, strict=False)) if a.id != b.id), None)
    if place is None:
        return Verdict.WRONG  # one answer is the beginning of the other
    before = [token.id for token in alone[:place]]
    apart = [await _behind(pool, call, before, token) for token in (alone[place], got[place])]
    return Verdict.TIE if max(apart) < tie_nats else Verdict.WRONG


async def _behind(pool: LocalPool, call: GenerateCall, before: list[int], token: TokenOut) -> float:
    """How far, in nats, a token is behind the best one after these."""
    assert isinstance(call.prompt, tuple)
    assert call.sampling.seed is not None
    model = pool.engines[pool.roles["large"] if call.method == "speculative" else token.source]
    sampling = call.sampling.model_copy(update={"max_tokens": len(before) + 1, "ignore_eos": True, "stop": ()})
    seq = Sequence(call.prompt, sampling, call.sampling.seed)
    for id_ in before:
        seq.append(Token(id_, model.name))
    try:
        return await behind(model, seq, (), token.id)
    finally:
        model.release(seq)
