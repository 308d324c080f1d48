"""The report on an answer: its tokens as clients see them, and at the end its usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from decoding.calibration import RAN
from decoding.candidate_report import CANDIDATES, DOUBTS
from decoding.drift import DRIFT
from decoding.model import MEASURES, Model
from decoding.sequence import Sequence as TokenSequence
from pool.detokenizer import Detokenizer
from pool.request_defaults import used
from pool.routing import Routing
from pool.validation import PreparedRequest
from turnout.calls import TokenOut, Usage
from turnout.candidate_sets import bounded
from turnout.cost import Meter, Price, report
from turnout.types import Token
from turnout.utf8 import name_of_part

plain_out = lru_cache(maxsize=1 << 16)(TokenOut)  # of an id, its text, a source and a kind; see `plain_token`


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings: where both have a mapping of a name, key by key; else the second's value holds."""
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping):
            both[key] = merged(first[key], second[key])
    return both


def with_answer(call: Mapping[str, Any], answer: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
    """Merge what an answer leaves into what the call's others left; measures of the same name stand in a row.

    Args:
        call: what others left.
        answer: what it left.
        index: of the answer, which its candidates and doubts get.
    """
    known, new = call.get(MEASURES, {}), answer.get(MEASURES, {})
    both = merged(call, {**answer, MEASURES: {name: (*known.get(name, ()), value) for name, value in new.items()}})
    for name in (CANDIDATES, DOUBTS):
        if name in answer:
            both[name] = [*call.get(name, ()), *(each.numbered(index) for each in answer[name])]
    return both


def token_out(token: Token, text: Detokenizer, thinking: bool = False) -> TokenOut:
    """The next token of an answer as clients see it.

    Args:
        token: what was written.
        text: the answer's, up to this token; takes it.
        thinking: whether it is thought, or a marker of thinking.
    """
    if not (token.top or token.rejected):  # most tokens
        span = text.span(token.id)
        broken = () if span.data == span.text.encode() else ((token.id, span.data),)
        if token.logprob is None and token.entropy_bits is None and not (broken or thinking):
            return plain_out(token.id, span.text, token.source, token.kind)
        usual = (token.id, span.text, token.source, token.kind, token.logprob, token.entropy_bits)
        return TokenOut(*usual, broken=broken, thinking=thinking)
    others = {other: text.peek(other) for other, _ in token.top}
    rejected = tuple(name_of_part(span.text, span.data) for span in map(text.peek, token.rejected))
    span = text.span(token.id)
    others.setdefault(token.id, span)
    return TokenOut(
        token.id,
        span.text,
        token.source,
        token.kind,
        token.logprob,
        token.entropy_bits,
        tuple((other, others[other].text, logprob) for other, logprob in token.top),
        rejected,
        tuple((other, each.data) for other, each in others.items() if each.data != each.text.encode()),
        thinking,
    )


def usage_of(
    prepared: PreparedRequest,
    sequences: Sequence[TokenSequence],
    large: Model,
    seconds: tuple[float, float],
    extra: Mapping[str, Any],
    notes: tuple[str, ...],
    routing: Routing | None,
    streams: Meter,
) -> Usage:
    """What a call took.

    Args:
        prepared: the call, with its plan.
        sequences: of its answers, the first one first.
        large: the model the cost is compared with.
        seconds: from the call's arrival to its first token, and to its end.
        extra: what its answers left, see `with_answer`: parameters the method ran with, drift, measures.
        notes: for the person who reads the answer.
        routing: of the call, if it was routed.
        streams: the work done for streams of a contrast, which is part of what models did.
    """
    plan, meter = prepared.plan, Meter()
    assert plan is not None
    for sequence in sequences:
        meter.merge(sequence.meter)
    meter.merge(streams)
    first_token_s, wall_s = seconds
    prompt_tokens = len(prepared.prompt)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(len(sequence.generated) for sequence in sequences),
        cached_tokens=max((each.cached_tokens for each in sequences[0].meter.models.values()), default=0),
        models=meter.models,
        speculation=meter.speculation,
        switches=meter.switches,
        cost=report(meter, large.name, large.num_parameters, prompt_tokens, wall_s, large.step_seconds()),
        method=plan.method.name,
        params={**plan.params.model_dump(mode="json"), **extra.get(RAN, {})},
        seed=prepared.seed,
        sampling=used(prepared.sampling),
        ttft_s=first_token_s,
        wall_s=wall_s,
        notes=notes,
        drift=extra.get(DRIFT),
        measures={name: fmean(values) for name, values in extra.get(MEASURES, {}).items()},
        candidates=bounded(sorted(extra.get(CANDIDATES, ()), key=lambda each: each.answers)),
        doubts=tuple(sorted(extra.get(DOUBTS, ()), key=lambda each: each.answer)),
        route=routing.shown(prepared.call.explain) if routing is not None else None,
        router_drift=routing.drift if routing is not None else (),
    )


def billed(usage: Usage, prices: Mapping[str, Price], large: str) -> Usage:
    """The usage with the cost in money, in US dollars.

    Args:
        usage: of a call; its models' meters get theirs.
        prices: of models, by name; others cost nothing.
        large: model that the cost is compared with.
    """
    for name, price in prices.items():
        if (meter := usage.models.get(name)) is not None:
            read = meter.prompt_tokens + meter.catchup_tokens
            meter.usd = price.of(read, meter.cached_tokens, meter.written_tokens)
    spent = replace(usage.cost.spent, usd=sum(meter.usd for meter in usage.models.values()))
    alone = usage.cost.large_only
    if large in prices:
        fresh = usage.prompt_tokens - usage.cached_tokens
        alone = replace(alone, usd=prices[large].of(fresh, usage.cached_tokens, usage.completion_tokens))
    return replace(usage, cost=replace(usage.cost, spent=spent, large_only=alone))
