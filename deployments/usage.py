"""Adding up what several calls of one HTTP request used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnout.calls import Usage
from turnout.cost import Cost, CostReport, Meter


def combine(usages: Sequence[Usage]) -> Usage:
    """One Usage for all: counts, FLOPs and seconds of work add up, times as seen by the client do not."""
    first = usages[0]
    if len(usages) == 1:
        return first
    total = Meter()
    for usage in usages:
        total.merge(
            Meter(
                models=usage.models,
                speculation=usage.speculation,
                switches=usage.switches,
            )
        )
    weights = [usage.completion_tokens for usage in usages]
    return replace(
        first,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(weights),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        models=total.models,
        speculation=total.speculation,
        switches=total.switches,
        cost=CostReport(
            spent=_add([usage.cost.spent for usage in usages], weights),
            large_only=_add([usage.cost.large_only for usage in usages], weights),
            large_share=_mean([usage.cost.large_share for usage in usages], weights),
            large_kept_share=_mean([usage.cost.large_kept_share for usage in usages], weights),
        ),
        ttft_s=min(usage.ttft_s for usage in usages),
        wall_s=max(usage.wall_s for usage in usages),
        queue_s=max(usage.queue_s for usage in usages),
        drift=next((usage.drift for usage in reversed(usages) if usage.drift is not None), None),
        notes=tuple(dict.fromkeys(note for usage in usages for note in usage.notes)),
    )


def _add(costs: list[Cost], weights: list[int]) -> Cost:
    return Cost(
        paper=_mean([cost.paper for cost in costs], weights),
        flops=sum(cost.flops for cost in costs),
        wall_s=sum(cost.wall_s for cost in costs),
    )


def _mean(values: list[float], weights: list[int]) -> float:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
