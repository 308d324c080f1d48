"""Traces of sampled requests, through every process that works on them. What is not sampled costs one comparison.

A request that is traced carries the `traceparent` (W3C Trace Context) of the span it is in; "" is: not traced. The
libraries are imported where traces are configured, and nowhere else.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnout.telemetry_config import TracesConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")
SAMPLED = 1

Attribute = str | bool | int | float | tuple[str, ...]

# The span that the current task works in.
_CURRENT: ContextVar[Span | None] = ContextVar("span", default=None)


@dataclass(slots=True)
class _Process:
    """What this process traces with; nothing where no traces are configured."""

    tracer: Tracer | None = None
    config: TracesConfig | None = None
    flush: Callable[[], Any] = bool
    end: Callable[[], Any] = bool
    allowance: float = 0.0
    counted: float = -float("inf")

    def follows(self, per_s: float) -> bool:
        """Whether a caller's trace is followed now: a caller decides about its own requests, not about all our time."""
        now, most = time.monotonic(), max(per_s, 1.0)
        self.allowance = min(self.allowance + (now - self.counted) * per_s, most)
        self.counted = now
        if self.allowance < 1:
            return False
        self.allowance -= 1
        return True


_PROCESS = _Process()


def set_up(config: TracesConfig | None, service: str) -> None:
    """Let this process trace, or no longer.

    Args:
        config: where spans go.
        service: what the process is, for people.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the folder cannot be written, or the exporter is not installed.
    """
    global _PROCESS
    made = _Process()
    if config is not None:
        from turnout.span_export import provider_of

        provider = provider_of(config, service)
        made = _Process(provider.get_tracer("turnout"), config, provider.force_flush, provider.shutdown)
    _PROCESS.end()
    _PROCESS = made


def flush() -> None:
    """Write what has not been written yet; blocks for as long as that takes."""
    _PROCESS.flush()


def enabled() -> bool:
    """Whether this process traces at all."""
    return _PROCESS.tracer is not None


def root(name: str, given: str, **attributes: Attribute) -> Span | None:
    """The first span of a request in this server, of kind SERVER; None where it is not traced.

    Args:
        name: of the span.
        given: the caller's `traceparent`, as it came; one that is malformed counts as none.
        attributes: of the span.
    """
    config = _PROCESS.config
    if config is None:
        return None
    found = TRACEPARENT.match(given) if given and config.follow else None
    if found is not None and int(found[1], 16) and int(found[2], 16):
        followed = int(found[3], 16) & SAMPLED and _PROCESS.follows(config.most_followed)
        return _start(name, given, attributes, serves=True) if followed else None
    if random.random() >= config.share:
        return None
    from opentelemetry.trace import SpanKind

    assert _PROCESS.tracer is not None
    return _PROCESS.tracer.start_span(name, kind=SpanKind.SERVER, attributes=attributes)


def begin(name: str, parent: str, **attributes: Attribute) -> Span | None:
    """A span below another one, perhaps of another process; None where that is "", or this process does not trace."""
    return _start(name, parent, attributes)


def _start(
    name: str, parent: str, attributes: Mapping[str, Attribute], links: Iterable[str] = (), serves: bool = False
) -> Span | None:
    if not parent or _PROCESS.tracer is None:
        return None
    from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, set_span_in_context

    linked = [Link(_context(each)) for each in links]
    above = set_span_in_context(NonRecordingSpan(_context(parent)), _nothing())
    kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
    return _PROCESS.tracer.start_span(name, above, kind, attributes=attributes, links=linked)


def end(span: Span | None, error: str = "", **attributes: Attribute) -> None:
    """End a span; `error` says what failed in it, in a word."""
    if span is None:
        return
    span.set_attributes(attributes)
    if error:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error))
    span.end()


def header_of(span: Span | None) -> str:
    """A span's `traceparent`; "" for none."""
    if span is None:
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{SAMPLED:02x}"


def trace_id(header: str) -> str:
    """The trace's id in a `traceparent`; "" where there is none."""
    found = TRACEPARENT.match(header)
    return found[1] if found is not None else ""


def current() -> Span | None:
    """The span that the current task works in."""
    return _CURRENT.get()


def header() -> str:
    """Its `traceparent`; "" for none."""
    span = _CURRENT.get()
    return header_of(span) if span is not None else ""


@contextmanager
def within(name: str, parent: str, **attributes: Attribute) -> Iterator[Span | None]:
    """The current task works in a new span for as long as the context lasts; see `begin`.

    A task only: a generator would leave the span to its consumer.
    """
    span = begin(name, parent, **attributes)
    if span is None:
        yield None
        return
    token = _CURRENT.set(span)
    failed = ""
    try:
        yield span
    except BaseException as error:
        failed = type(error).__name__
        raise
    finally:
        _CURRENT.reset(token)
        end(span, failed)


def batch(name: str, spans: list[Span], attributes: Mapping[str, Attribute]) -> Span | None:
    """Begin the span of work done for several requests at once.

    It stands in the trace of the first one, with links to all others, which have links to it.

    Args:
        name: of the span.
        spans: the requests', at least one.
        attributes: of the span.
    """
    span = _start(name, header_of(spans[0]), attributes, [header_of(other) for other in spans[1:]])
    if span is not None:
        for other in spans[1:]:
            other.add_link(span.get_span_context())
    return span


def _nothing() -> Context:
    from opentelemetry.context import Context

    return Context()


def _context(header: str) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    found = TRACEPARENT.match(header)
    assert found is not None, header
    return SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
