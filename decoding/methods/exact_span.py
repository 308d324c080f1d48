"""The most probable part of a passage, found exactly: under the structure `span`, of a text that the prompt holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from decoding.decode_loop import stream
from decoding.model import Model, ModelPool, ReadSpec, Request, TokenText
from decoding.sequence import Sequence
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

KIND = "span"


class ExactSpanParams(MethodParams):
    """Parameters of `exact_span`."""

    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    longest: Annotated[int, Field(ge=1, le=1024, description="tokens of the longest part")] = 32
    normalised: Annotated[bool, Field(description="whether log-probabilities are divided by the number of tokens")] = (
        False
    )
    at_once: Annotated[int, Field(ge=1, le=256, description="beginnings in one batch")] = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A part of the passage.

    Attributes:
        score: what is compared.
        begin: place of its first token in the prompt.
        logprobs: of its tokens, and of the end after them.
        end: the likeliest token that ends an answer there.
    """

    score: float
    begin: int
    logprobs: tuple[float, ...]
    end: int


@method(params=ExactSpanParams, papers=(164,), lossless=False, needs=frozenset())
async def exact_span(request: Request, models: ModelPool, params: ExactSpanParams) -> AsyncIterator[Segment]:
    """One model answers with the part of a passage that it finds most probable of all.

    Paper #164 (How Optimal is Greedy Decoding for Extractive Question Answering?), exact-extract. The passage is the
    value of the structure `span`, and stands in the prompt; its parts are runs of the prompt's tokens there. For every
    beginning, the tokens after it are fed once after the prompt, and the probability of an end is read after each: one
    row for a beginning instead of one for every part. The answer is the part with the greatest log-probability, its
    end included; temperature and seed do not matter. Nothing is shown before all are read.
    """
    model, seq = models.by_role(params.model), request.sequence
    begin, end = passage(seq, models.tokenizer)
    longest = min(params.longest, seq.num_remaining - 1)
    if begin == end or longest < 1 or not seq.end_ids:
        request.notes.append("exact_span: as plain, for the prompt does not hold a passage that `structure.span` gives")
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    await model.extend(seq, want=ReadSpec(draw=None))  # the twins share the prompt's blocks
    best: Found | None = None
    for first in range(begin, end, params.at_once):
        places = range(first, min(first + params.at_once, end))
        found = await _batch(model, seq, places, min(end, seq.num_prompt_tokens), longest, params.normalised)
        best = max([*found, *([best] if best else [])], key=lambda each: (each.score, -each.begin))
    assert best is not None
    text = seq.tokens[best.begin : best.begin + len(best.logprobs) - 1]
    tokens = tuple(
        Token(token, model.name, logprob=logprob)
        for token, logprob in zip([*text, best.end], best.logprobs, strict=True)
    )
    for token in tokens:
        seq.append(token, model.num_parameters)
    yield Segment(tokens, "finish")


def passage(seq: Sequence, texts: TokenText) -> tuple[int, int]:
    """Return the places of the prompt's tokens that lie wholly in the passage where it stands last; equal: none do."""
    structure = seq.sampling.structure
    if structure is None or structure.kind != KIND:
        return 0, 0
    prompt, starts, whole = seq.tokens[: seq.num_prompt_tokens], [], b""
    for token in prompt:
        starts.append(len(whole))
        whole += texts.token_bytes(token)
    wanted = structure.value.encode()
    first = whole.rfind(wanted)
    if first < 0:
        return 0, 0
    last = first + len(wanted)
    ends = [*starts[1:], len(whole)]
    inside = [
        place for place, (begins, stops) in enumerate(zip(starts, ends, strict=True)) if first <= begins < stops <= last
    ]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


async def _batch(model: Model, seq: Sequence, places: range, end: int, longest: int, normalised: bool) -> list[Found]:
    """The best part from each of some beginnings; all are fed together."""
    twins = model.fork_many([seq] * len(places))
    try:
        tasks = [
            asyncio.ensure_future(_from(model, twin, place, min(place + longest, end), normalised))
            for twin, place in zip(twins, places, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for twin in twins:
            model.release(twin)


async def _from(model: Model, seq: Sequence, begin: int, end: int, normalised: bool) -> Found:
    """The best part that begins at a place; of equal ones the shortest."""
    tokens, ends = tuple(seq.tokens[begin:end]), sorted(seq.end_ids)
    rows = await model.extend(seq, tokens, want=ReadSpec(draw=None, logits=True), every=True)
    logits = [row.logits for row in rows if row.logits is not None]
    logp = torch.log_softmax(torch.stack(logits).float(), -1).cpu()
    own = logp[torch.arange(len(tokens)), torch.tensor(tokens)].double()
    closing, which = logp[1:, ends].double().max(-1)
    scores = own.cumsum(0) + closing
    if normalised:
        scores = scores / torch.arange(2, len(tokens) + 2)
    best = int(scores.argmax())
    logprobs = (*own[: best + 1].tolist(), float(closing[best]))
    return Found(float(scores[best]), begin, logprobs, ends[int(which[best])])
