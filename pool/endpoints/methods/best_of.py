"""Several answers are drawn, the best of them is shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from decoding.aggregators.base import Aggregator, AnswerSet, Candidate
from decoding.candidate_report import chosen_from
from decoding.candidates import final_answer
from decoding.methods.best_of import BestOfParams, choose
from decoding.noise import derive_seed
from pool.endpoints.answers import Drafts, as_asked
from pool.endpoints.failover import TextModels, TextRequest
from pool.endpoints.streams import together
from pool.endpoints.text_model import one_of
from turnout.calls import Chunk
from turnout.candidate_sets import bounded
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
        group = AnswerSet([_candidate(each, params.mark) for each in drafts.answers], derive_seed(request.seed, index))
        aggregator = params.aggregator()
        best = await _best(aggregator, group, models.name(params.model))
        if call.candidates:
            request.work.candidates += bounded([chosen_from(aggregator, group, best).numbered(index)])
        request.work.measure(group.measures)
        for note in group.notes:
            request.work.note(note)
        drafts.settle(request.work, [best])
        yield replace(as_asked(drafts.answers[best], call), index=index)


async def _drawn(drafts: Coroutine[Any, Any, Drafts]) -> AsyncIterator[Drafts]:
    yield await drafts


async def _best(aggregator: Aggregator, group: AnswerSet, model: str) -> int:
    if aggregator.reads_logprobs and len(group.answers) > 1 and not all(each.logprobs for each in group.answers):
        why = f"{aggregator.name} needs log-probabilities, and {model!r} gives none; use majority"
        raise invalid("params.rerank", why)
    return await choose(aggregator, group)


def _candidate(draft: Chunk, mark: str) -> Candidate:
    logprobs = tuple(token.logprob for token in draft.tokens if token.logprob is not None)
    final = final_answer(draft.text, mark)
    whole = draft.reasoning + draft.text
    return Candidate(draft.text, whole, final, logprobs=logprobs, num_tokens=len(draft.tokens))
