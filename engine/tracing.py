"""The spans of a traced request where the models are: each operation, and each forward pass it takes part in."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from decoding.model import Model, ModelPool, WrappedModel
from decoding.operations import Operation
from decoding.sequence import Sequence
from turnout import tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from engine.runner import Feed
    from engine.scheduler.queued_operation import QueuedOperation


R = TypeVar("R")


class TracedModel(WrappedModel):
    """A model every operation of which is a span below that of the task which asks for it."""

    async def do(self, seq: Sequence, op: Operation[R]) -> R:
        """See `decoding.model.Model.do`."""
        with tracing.within(f"{self.inner.name} {op.name}", tracing.header()):
            return await self.inner.do(seq, op)


def spanned(models: ModelPool) -> ModelPool:
    """The pool as a traced request sees it: every operation of a model is a span."""
    seen: dict[str, Model] = {name: TracedModel(model) for name, model in models.models.items()}
    return replace(models, models=seen)


def forward_span(model: str, steps: Items[tuple[QueuedOperation, Feed]]) -> Span | None:
    """Begin the span of a forward pass; None where no traced request takes part in it."""
    if not tracing.enabled():
        return None
    spans = [work.span for work, _ in steps if work.span is not None]
    if not spans:
        return None
    tokens = sum(len(feed.tokens) for _, feed in steps)
    return tracing.batch(f"{model} forward", spans, {"sequences": len(steps), "tokens": tokens})
