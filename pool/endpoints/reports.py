"""What a pool with endpoints says of itself and of its answers: descriptions, stats, usage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from pool.endpoints.failover import TextRequest
from pool.endpoints.text_model import EndpointModel, LocalModel, TextModel
from pool.prefix_stores import summed
from pool.request_defaults import used
from pool.routing import Routing
from pool.validation import PreparedRequest
from turnout.calls import ModelDescription, PoolStats, Usage
from turnout.candidate_sets import bounded
from turnout.config import PoolConfig
from turnout.cost import report
from turnout.registry import ALONE

SUMMED = ("sequences", "used_blocks", "cached_blocks", "total_blocks", "waiting", "waiting_s", "prompt_token_s")


def usage_of(
    prepared: PreparedRequest,
    request: TextRequest,
    large: TextModel,
    seconds: tuple[float, float],
    notes: Iterable[str],
    routing: Routing | None,
) -> Usage:
    """What a call took; money is left out.

    Args:
        prepared: the call, with its plan.
        request: what was done for it.
        large: the model the cost is compared with.
        seconds: from the start to the first chunk, and to the end.
        notes: of the routing.
        routing: of the call, if it was routed.
    """
    work, plan = request.work, prepared.plan
    assert plan is not None
    first_s, wall_s = seconds
    given = prepared.call.sampling  # the rest is left to the endpoint, whose defaults are not known
    return Usage(
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.meter.answer_tokens,
        cached_tokens=work.cached_tokens,
        reasoning_tokens=work.reasoning_tokens,
        models=work.meter.models,
        speculation=work.meter.speculation,
        switches=work.switches,
        cost=report(work.meter, large.name, large.num_parameters, work.prompt_tokens, wall_s, large.step_seconds()),
        method=plan.method.name,
        params=plan.params.model_dump(mode="json"),
        seed=prepared.seed,
        sampling={name: value for name, value in used(given).items() if name in given.model_fields_set},
        ttft_s=first_s,
        wall_s=wall_s,
        notes=tuple(dict.fromkeys([*notes, *plan.notes, *work.notes])),
        measures={name: fmean(values) for name, values in work.measured.items()},
        candidates=bounded(sorted(work.candidates, key=lambda each: each.answers)),
        route=routing.shown(prepared.call.explain) if routing is not None else None,
        router_drift=routing.drift if routing is not None else (),
    )


def described(name: str, config: PoolConfig, models: Mapping[str, TextModel], routed: bool) -> list[ModelDescription]:
    """Describe a pool first, then its members; where a length or a vocabulary is not known, it is 0."""
    found = {each: _described(model) for each, model in models.items()}
    pool = ModelDescription(
        name,
        found[config.large].architecture,
        sum(each.num_parameters for each in found.values()),
        0,
        min((each.max_length for each in found.values() if each.max_length), default=0),
        config.roles,
        config.default.name,
        config.default.params,
        routed,
    )
    return [pool, *found.values()]


def _described(model: TextModel) -> ModelDescription:
    if isinstance(model, LocalModel):
        return next(each for each in model.pool.models() if each.name == model.name)
    assert isinstance(model, EndpointModel)
    config = model.client.config
    kind = f"endpoint ({config.dialect})"
    return ModelDescription(model.name, kind, model.num_parameters, 0, config.max_length, {}, ALONE)


def stats_of(models: Mapping[str, TextModel]) -> PoolStats:
    """What models hold right now; of requests, nothing."""
    local = [model.pool.stats() for model in models.values() if isinstance(model, LocalModel)]
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in local) for name in SUMMED}
    return PoolStats(
        requests=0,
        tokens_per_second=0.0,
        step_seconds={name: model.step_seconds() for name, model in models.items()},
        members=tuple(member for each in local for member in each.members),
        now=time.time(),
        cache=summed([each.cache for each in local if each.cache is not None]),
        audit=next((each.audit for each in local if each.audit is not None), None),
        endpoints=tuple(model.stats() for model in models.values() if isinstance(model, EndpointModel)),
        **sums,
    )
