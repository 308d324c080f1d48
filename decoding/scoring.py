"""Log-likelihood of given continuations: what every model's `score` does around its forward pass."""

from __future__ import annotations

import torch

from decoding.model import Model, ReadSpec, Score
from decoding.sequence import Sequence


async def score_continuation(model: Model, seq: Sequence, continuation: tuple[int, ...], top: int) -> Score:
    """Score one continuation of `seq` under the raw logits, in nats.

    Args:
        model: runs the forward.
        seq: the context; not appended to.
        continuation: token ids, at least one.
        top: alternatives reported per token.
    """
    rows = await model.extend(seq, continuation, ReadSpec(draw=None, logits=True, top=top), every=True)
    before = rows[:-1]
    logp = torch.stack([row.logits for row in before if row.logits is not None]).log_softmax(-1)
    picked = logp.gather(1, torch.tensor(continuation, device=logp.device)[:, None])[:, 0]
    best = logp.argmax(-1).tolist()
    return Score(
        token_logprobs=tuple(picked.tolist()),
        greedy=tuple(b == t for b, t in zip(best, continuation, strict=True)),
        top=tuple(row.top for row in before),
        ranks=tuple((logp > picked[:, None]).sum(-1).add(1).tolist()),
    )
