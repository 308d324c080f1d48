"""The most probable part of a passage, found exactly: under the structure `span`, of a text that the prompt holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import torch
from pydantic import Field

from decoding.candidates import charge
from decoding.decode_loop import reported, stream
from decoding.model import Model, ModelPool, ReadSpec, Request, TokenText
from decoding.sequence import Sequence
from decoding.steps import tokens_written
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment, Token

KIND = "span"
MOST_ROWS = 1024  # of logits that are held at once
NO_TEXT = b"\xff"  # is in no text
WITHIN = (b"\x80", b"\xc0")  # the first byte that is within a character, and the first after them


class ExactSpanParams(MethodParams):
    """Parameters of `exact_span`."""

    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    longest: Annotated[int, Field(ge=1, le=1024, description="tokens of the longest part")] = 32
    normalised: Annotated[bool, Field(description="whether log-probabilities are divided by the number of tokens")] = (
        False
    )
    at_once: Annotated[int, Field(ge=1, le=256, description="most beginnings in one batch")] = 16


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

    def text(self, seq: Sequence) -> list[int]:
        """Its tokens, without the end."""
        return seq.tokens[self.begin : self.begin + len(self.logprobs) - 1]


@method(params=ExactSpanParams, papers=(164,), lossless=False, needs=frozenset())
async def exact_span(request: Request, models: ModelPool, params: ExactSpanParams) -> AsyncIterator[Segment]:
    """One model answers with the part of a passage that it finds most probable of all.

    Paper #164 (How Optimal is Greedy Decoding for Extractive Question Answering?), exact-extract. The passage is the
    value of the structure `span`, and stands in the prompt; its parts are runs of the prompt's tokens there, of whole
    characters. For every beginning, the tokens after it are fed once after the prompt, and the probability of an end is
    read after each: one row for a beginning instead of one for every part. The answer is the part with the greatest
    log-probability, its end included; temperature and seed do not matter. Nothing is shown before all are read.
    """
    model, seq = models.by_role(params.model), request.sequence
    cuts, why = passage(seq, models.tokenizer), _unsupported(seq)
    longest = min(params.longest, seq.num_remaining - 1)
    best = None if why else await most_probable(model, seq, cuts, longest, params.normalised, params.at_once)
    if best is None:
        why = why or "the prompt does not hold a passage that `structure.span` gives"
        request.notes.append(f"exact_span: as plain, for {why}")
        async with aclosing(stream(model, seq, request.streams)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment
        return
    step = (*best.text(seq), best.end)
    if reported(seq).reads_logits:
        tokens = await tokens_written(model, seq, step)
    else:
        tokens = [Token(token, model.name, logprob=logprob) for token, logprob in zip(step, best.logprobs, strict=True)]
    yield Segment(seq.extend(tokens, models.sizes), "finish")


async def most_probable(
    model: Model,
    seq: Sequence,
    cuts: tuple[int, ...],
    longest: int,
    normalised: bool,
    at_once: int,
    done: Callable[[int, int], object] = lambda _, __: None,
) -> Found | None:
    """Find the most probable answer among the parts of a passage; None: it has none.

    Args:
        model: reads.
        seq: holds the passage in its prompt.
        cuts: of `passage`.
        longest: tokens of the longest part.
        normalised: whether log-probabilities are divided by the number of tokens.
        at_once: most beginnings in one batch.
        done: called with the number of beginnings that were read, and of all.
    """
    best: Found | None = None
    if len(cuts) < 2:
        return None
    await model.extend(seq, want=ReadSpec(draw=None))  # the twins share the prompt's blocks
    at_once = min(at_once, max(1, MOST_ROWS // (longest + 1)))
    for first in range(0, len(cuts) - 1, at_once):
        near = [cuts[at : at + longest + 1] for at in range(first, min(first + at_once, len(cuts) - 1))]
        found = await _batch(model, seq, near, longest, normalised)
        best = _best([*([best] if best else []), *found], seq)
        done(first + len(near), len(cuts) - 1)
    return best


def _best(found: list[Found], seq: Sequence) -> Found | None:
    """The most probable one; of those with its tokens, whose scores differ by rounding alone, the first."""
    best = max(found, key=lambda each: each.score, default=None)
    return next((each for each in found if best is not None and each.text(seq) == best.text(seq)), None)


def _unsupported(seq: Sequence) -> str:
    """Why parts are not searched; "": they are."""
    thinking = seq.thinking
    if thinking is not None and (thinking.start == "inside" or (thinking.channels and thinking.start == "open")):
        return "the answer does not begin with its text: the model thinks first"
    if seq.num_remaining < 2:
        return "the answer may have one token only"
    if seq.sampling.bans_tokens or not seq.end_ids:
        return "the request says which tokens may be written, or that none ends the answer"
    return ""


def passage(seq: Sequence, texts: TokenText) -> tuple[int, ...]:
    """Return where parts of the passage may begin or end: places of the prompt's tokens, where it stands last.

    Only tokens that lie wholly in it count, and special ones do not, whose names are no text. Empty: there are none.
    """
    structure = seq.sampling.structure
    if structure is None or structure.kind != KIND:
        return ()
    return tuple(cuts_in(seq.tokens[: seq.num_prompt_tokens], structure.value, texts))


def cuts_in(prompt: list[int], value: str, texts: TokenText) -> dict[int, int]:
    """Return, by place of a prompt's tokens, the byte of a text within it at which it may be cut; see `passage`."""
    # Twice: the blank at the beginning of a text is left out by some tokenizers.
    data = {token: texts.token_bytes(token) if texts.decode([token, token]) else NO_TEXT for token in set(prompt)}
    starts = [0, *accumulate(len(data[token]) for token in prompt)]
    wanted = value.encode()
    first = b"".join(data[token] for token in prompt).rfind(wanted)
    if first < 0:
        return {}
    cuts = {place: start - first for place, start in enumerate(starts) if first <= start <= first + len(wanted)}
    return {place: cut for place, cut in cuts.items() if not WITHIN[0] <= wanted[cut:][:1] < WITHIN[1]}


async def _batch(
    model: Model, seq: Sequence, near: list[tuple[int, ...]], longest: int, normalised: bool
) -> list[Found]:
    """The best part from each of some beginnings; all are fed together."""
    twins = model.fork_many([seq] * len(near))
    try:
        tasks = [
            asyncio.ensure_future(_from(model, twin, cuts, longest, normalised))
            for twin, cuts in zip(twins, near, strict=True)
        ]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [each for each in found if each is not None]
    finally:
        for twin in twins:
            charge(seq, twin)
            model.release(twin)


async def _from(model: Model, seq: Sequence, cuts: tuple[int, ...], longest: int, normalised: bool) -> Found | None:
    """The best part between the first of some places and another; of equal ones the shortest. None: all are longer."""
    begin = cuts[0]
    sizes = [cut - begin for cut in cuts[1:] if cut - begin <= longest]
    if not sizes:
        return None
    tokens, ends = tuple(seq.tokens[begin : begin + sizes[-1]]), sorted(seq.end_ids)
    rows = await model.extend(seq, tokens, want=ReadSpec(draw=None, logits=True), every=True)
    logits = torch.stack([row.logits for row in rows if row.logits is not None]).float()
    whole = logits.logsumexp(-1)
    fed = torch.tensor(tokens, device=logits.device)
    own = (logits[:-1].gather(1, fed[:, None])[:, 0] - whole[:-1]).cpu().double()
    closing, which = (logits[1:, ends] - whole[1:, None]).cpu().double().max(-1)
    scores = own.cumsum(0) + closing
    if normalised:
        scores = scores / torch.arange(2, len(tokens) + 2)
    best = max(sizes, key=lambda size: (float(scores[size - 1]), -size))
    logprobs = (*own[:best].tolist(), float(closing[best - 1]))
    return Found(float(scores[best - 1]), begin, logprobs, ends[int(which[best - 1])])
