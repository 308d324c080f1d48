"""How far a token is from the one that its model would have chosen, and what of it rounding explains."""

from __future__ import annotations

from decoding.logits import choice_scores, process
from decoding.model import Model, ReadSpec
from decoding.noise import Purpose, gumbel, noise_key
from decoding.row_context import RowContext
from decoding.sequence import Sequence

# Tokens whose scores, in nats and noise included, are closer than this may change places. float32 logits move by about
# 1e-5 with the shape of a batch. In bfloat16 it moved the distance between the demo large model's two best tokens by
# up to 0.05 nats in 288 places, and by 0.003 in half of them; an answer and the forward that judges it may each be off.
# float16 rounds to an eighth of that.
TIES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.0125}


async def behind(model: Model, seq: Sequence, path: tuple[int, ...], token: int) -> float:
    """How far a token is behind the best choice at one place, in nats, noise included; 0.0: it is the best one.

    Args:
        model: chooses.
        seq: what comes before; not appended to.
        path: tokens after it, before the place.
        token: to be judged.
    """
    [row] = await model.extend(seq, path, ReadSpec(draw=None, logits=True))
    assert row.logits is not None
    logits, history = row.logits[None].float(), RowContext(seq, path)
    if seq.sampling.greedy:
        scores = choice_scores(logits, [history])[0]
    else:
        key = noise_key(seq.seed, history.position, Purpose.SAMPLE)
        scores = process(logits, [history])[0] + gumbel([key], logits.shape[1], logits.device)[0]
    return float(scores.max() - scores[token])
