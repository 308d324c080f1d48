"""Several answers are drawn, the best of them is shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from decoding.candidates import final_answer
from decoding.methods.best_of import BestOfParams, chosen
from pool.endpoints.answers import Drafts, as_asked
from pool.endpoints.failover import TextModels, TextRequest
from pool.endpoints.streams import together
from pool.endpoints.text_model import one_of
from turnout.calls import Chunk
from turnout.errors import invalid


async def run(request: TextRequest, models: TextModels, params: BestOfParams) -> AsyncIterator[Chunk]:
    """Draw `k` answers for each that was asked for, and show the one that most agree on, or the likeliest."""
    count, call = params.k, request.call
    if call.sampling.greedy and count > 1:
        request.work.note(f"one answer instead of {count}: at temperature 0 they would all be the same")
        count = 1
    update = {"n": count, "logprobs": call.sampling.logprobs or 0}
    draws = []
    for index in range(call.sampling.n):
        one = one_of(call, index)
        asked = replace(one, sampling=one.sampling.model_copy(update=update))
        draws.append(_drawn(Drafts.write(request, models, params.model, asked)))
    async for index, drafts in together(draws):
        best = _best(drafts.answers, params, models.name(params.model))
        drafts.settle(request.work, [best])
        yield replace(as_asked(drafts.answers[best], call), index=index)


async def _drawn(drafts: Coroutine[Any, Any, Drafts]) -> AsyncIterator[Drafts]:
    yield await drafts


def _best(drafts: list[Chunk], params: BestOfParams, model: str) -> int:
    values = [_mean_logprob(draft) for draft in drafts]
    if params.rerank == "logprob" and None in values and len(drafts) > 1:
        raise invalid("params.rerank", f"logprob needs log-probabilities, and {model!r} gives none; use majority")
    texts = [final_answer(draft.text, params.mark) for draft in drafts] if params.rerank == "majority" else None
    return chosen([float("-inf") if value is None else value for value in values], texts)


def _mean_logprob(draft: Chunk) -> float | None:
    values = [token.logprob for token in draft.tokens if token.logprob is not None]
    return sum(values) / len(values) if values else None
