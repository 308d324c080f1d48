"""The spans of a traced request where the models are: each operation, and each forward pass it takes part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from decoding.model import Model, ModelPool
from router.shadows import OPERATIONS
from turnout import tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from engine.runner import Feed
    from engine.work import Work


def spanned(models: ModelPool) -> ModelPool:
    """The pool as a traced request sees it: every operation of a model is a span."""
    seen = {name: cast(Model, tracing.Traced(model, OPERATIONS, name)) for name, model in models.models.items()}
    return replace(models, models=seen)


def forward_span(model: str, steps: Sequence[tuple[Work, Feed]]) -> Span | None:
    """Begin the span of a forward pass; None where no traced request takes part in it."""
    if not tracing.enabled():
        return None
    spans = [work.span for work, _ in steps if work.span is not None]
    if not spans:
        return None
    tokens = sum(len(feed.tokens) for _, feed in steps)
    return tracing.batch(f"{model} forward", spans, {"sequences": len(steps), "tokens": tokens})
