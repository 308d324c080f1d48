"""The small model answers; where it was not sure of what it wrote, the large one answers instead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from decoding.methods.cascade import CascadeParams, Confidence, confidence
from pool.endpoints.answers import Drafts, as_asked
from pool.endpoints.failover import TextModels, TextRequest
from pool.endpoints.streams import together
from pool.endpoints.text_model import one_of
from turnout.calls import Chunk, GenerateCall
from turnout.errors import invalid
from turnout.types import FinishReason


async def run(request: TextRequest, models: TextModels, params: CascadeParams) -> AsyncIterator[Chunk]:
    """Hold the small model's answers until they are judged by the log-probabilities that came with them."""
    call, small = request.call, models.name("small")
    drafts = await Drafts.write(request, models, "small", _measured(call, params.confidence))
    kept = []
    for draft in drafts.answers:
        whole = params.keep_cut or draft.finish_reason is not FinishReason.LENGTH
        if whole and _confidence(draft, small, params.confidence) >= params.threshold:
            kept.append(draft.index)
    drafts.settle(request.work, kept)
    for index in kept:
        yield as_asked(drafts.answers[index], call)
    asked_again = [draft.index for draft in drafts.answers if draft.index not in kept]
    request.work.switches += len(asked_again)
    answers = [models.answer(request, "large", one_of(call, index)) for index in asked_again]
    async with aclosing(together(answers)) as chunks:  # type: ignore[type-var]
        async for place, chunk in chunks:
            yield replace(chunk, index=asked_again[place])


def _measured(call: GenerateCall, kind: Confidence) -> GenerateCall:
    """The call, with what the confidence is read from."""
    asked = {"logprobs": call.sampling.logprobs or 0, "token_details": kind == "entropy" or call.sampling.token_details}
    return replace(call, sampling=call.sampling.model_copy(update=asked))


def _confidence(draft: Chunk, model: str, kind: Confidence) -> float:
    """Confidence in an answer; without a token there is none.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the model's server gives no log-probabilities, or entropies are wanted of it.
    """
    if not draft.tokens:
        return float("-inf")
    value = "entropy_bits" if kind == "entropy" else "logprob"
    if any(getattr(token, value) is None for token in draft.tokens):
        what = "entropies" if kind == "entropy" else "log-probabilities"
        raise invalid("method", f"'cascade' needs {what} of the small model's tokens, and {model!r} gives none")
    return confidence(draft.tokens, kind)
