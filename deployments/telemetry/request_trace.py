"""One request as the ingress sees it, from its arrival to its end: times, outcome, the first span of its trace."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from deployments.metrics import CALLER_DEADLINE, OTHER, Metrics, Times
from deployments.telemetry.gen_ai import operation_of, request_attributes, response_attributes
from deployments.telemetry.request_log import RequestLog
from turnout import tracing
from turnout.calls import Chunk, Event, GenerateCall, Usage
from turnout.embed_calls import AnyCall, EmbedCall, TaskCall
from turnout.errors import Code, TurnoutError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from deployments.access.lease import Lease


@dataclass(slots=True)
class RequestTrace:
    """Trace of one request: times, outcome, usage.

    Attributes:
        call: as it came, then as it was admitted.
        kind: stream, generate, score or embed.
        span: the trace's first one here; None: it is not traced.
        began: when it came, by `time.perf_counter`.
        first_s: when the first token was there, seconds later; 0.0: none was seen come.
        lease: what came of it, as far as that is counted; None: it was not let in, or is a score.
        usage: what it took; None: it was not answered.
        outcome: OK, or a code.
        refusal: why it was refused or failed.
        impatient: it is over because its caller gave it less time than it could have had.
        finish_reasons: of the answers that are finished, by their index; of a request that is not traced, none.
    """

    call: AnyCall
    kind: str
    span: Span | None = None
    began: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    lease: Lease | None = None
    usage: Usage | None = None
    outcome: str = "OK"
    refusal: TurnoutError | None = None
    impatient: bool = False
    finish_reasons: dict[int, str] = field(default_factory=dict)

    def admitted(self, call: GenerateCall) -> GenerateCall:
        """Return the call in its span, or in none."""
        header = tracing.header_of(self.span)
        self.call = call = call if header == call.trace else replace(call, trace=header)
        return call

    def sent(self, events: Iterable[Event]) -> None:
        """Note what a client is sent of the answer as it is written: when the first of it came, how it ended."""
        if not self.first_s and any(map(_writes, events)):
            self.first_s = time.perf_counter() - self.began
        self.finished(events)

    def finished(self, events: Iterable[Event]) -> None:
        """Note how answers ended, for the span."""
        if self.span is None:
            return
        for event in events:
            if isinstance(event, Chunk) and event.finish_reason is not None:
                self.finish_reasons[event.index] = event.finish_reason.value

    @property
    def times(self) -> Times:
        """Of an answer, as seen here."""
        whole_s = time.perf_counter() - self.began
        assert self.usage is not None
        first_s = self.first_s or max(whole_s - (self.usage.wall_s - self.usage.ttft_s), 0.0)
        return Times(first_s, whole_s, self.call.sampling.n if isinstance(self.call, GenerateCall) else 1)


class RequestTracer:
    """Recorder of an ingress's requests: counts, logs and traces them.

    Args:
        metrics: counted there.
        log: written there; None: nowhere.
        limit_s: the longest that any request may take.
    """

    def __init__(self, metrics: Metrics, log: RequestLog | None = None, limit_s: float = inf) -> None:
        self._limit_s = limit_s
        self._metrics = metrics
        self._log = log

    @contextmanager
    def over(self, call: AnyCall, kind: str, label: str, large: str = "") -> Iterator[RequestTrace]:
        """A request is worked on for as long as the context lasts; what is raised in it is its outcome.

        Args:
            call: as it came.
            kind: stream, generate, score or embed.
            label: the model it asks for, where there is one; "" for unknown names.
            large: the large model of its pool.
        """
        given = call.trace if isinstance(call, GenerateCall) else ""
        trace = RequestTrace(call, kind, tracing.root(kind, given, request_id=call.request_id, model=label))
        if trace.span is not None:
            trace.span.set_attributes(request_attributes(call, kind, label))
        try:
            yield trace
        except TurnoutError as error:
            trace.outcome, trace.refusal = error.code.value, error
            own = (call.deadline_s or inf) < self._limit_s
            trace.impatient = own and error.code is Code.DEADLINE_EXCEEDED
            raise
        except BaseException:  # a cancelled task or a closed generator; who has all of it may close it, too
            trace.outcome = "OK" if trace.usage is not None else Code.CANCELLED.value
            raise
        finally:
            self._ended(trace, label, large)

    def refused(self, error: TurnoutError, tenant: str = OTHER, request_id: str = "", key_id: str = "") -> None:
        """A request was refused before anybody knew what it asks for, or even whose it is.

        Args:
            error: why.
            tenant: whose it is, as far as that is known.
            request_id: "": it has none yet.
            key_id: of the key it came with; "": of none that there is.
        """
        self._metrics.refused_early(error, tenant)
        if self._log is None:
            return
        entry = {"request_id": request_id, "tenant": tenant, "kind": "refused", "outcome": error.code.value}
        if error.field is not None:
            entry["field"] = error.field[:100]
        if key_id:
            entry["key_id"] = key_id
        self._log.write(entry)

    @contextmanager
    def refusing(self, tenant: str = OTHER, request_id: str = "", key_id: str = "") -> Iterator[None]:
        """What is refused in the context is counted and logged, as by `refused`."""
        try:
            yield
        except TurnoutError as error:
            self.refused(error, tenant, request_id, key_id)
            raise

    def _ended(self, trace: RequestTrace, label: str, large: str) -> None:
        tenant = trace.call.tenant
        self._metrics.finished(label, CALLER_DEADLINE if trace.impatient else trace.outcome, tenant)
        if trace.refusal is not None:
            self._metrics.refused(trace.refusal)
        operation, gen_ai = operation_of(trace.call, trace.kind), self._metrics.gen_ai
        gen_ai.ended(operation, label, trace.outcome, time.perf_counter() - trace.began)
        if trace.usage is not None:
            times = trace.times
            self._metrics.used(label, tenant, trace.usage, times, large)
            gen_ai.answered(operation, label, trace.usage, times.first_token_s, times.token_s(trace.usage))
        elif trace.lease is not None:
            self._metrics.cut_short(label, tenant, trace.lease.prompt_tokens, trace.lease.sources, large)
        if self._log is not None:
            self._log.write(_entry(trace, label, self._log.texts))
        if trace.span is not None:
            _end_span(trace.span, trace, label)


class UntracedRequests(RequestTracer):
    """Recorder that skips admitted requests, for a process whose metrics and traces are not read."""

    @contextmanager
    def over(self, call: AnyCall, kind: str, label: str, large: str = "") -> Iterator[RequestTrace]:
        """See `RequestTracer.over`."""
        yield _Untraced(call, kind)


class _Untraced(RequestTrace):
    """Trace that keeps nothing."""

    def admitted(self, call: GenerateCall) -> GenerateCall:
        """The same call."""
        return call

    def sent(self, events: Iterable[Event]) -> None:
        """Nothing is looked at."""


def _writes(event: Event) -> bool:
    """Whether it is a part of the answer that a client sees."""
    return isinstance(event, Chunk) and bool(event.tokens or event.text or event.reasoning)


def _end_span(span: Span, trace: RequestTrace, label: str) -> None:
    reasons = [reason for _, reason in sorted(trace.finish_reasons.items())]
    span.set_attributes(response_attributes(trace.call, label, trace.usage, reasons))
    error = "" if trace.outcome == "OK" else trace.outcome
    if error:
        span.set_attribute("error.type", error)
    tracing.end(span, error, tenant=trace.call.tenant, outcome=trace.outcome)


def _entry(trace: RequestTrace, label: str, texts: bool) -> dict[str, Any]:
    call, usage = trace.call, trace.usage
    entry: dict[str, Any] = {
        "request_id": call.request_id,
        "tenant": call.tenant,
        "kind": trace.kind,
        "model": label,
        "outcome": trace.outcome,
        "wall_s": round(time.perf_counter() - trace.began, 6),
    }
    if trace.span is not None:
        entry["trace_id"] = tracing.trace_id(tracing.header_of(trace.span))
    if trace.refusal is not None and trace.refusal.field is not None:
        entry["field"] = trace.refusal.field[:100]
    if usage is not None:
        entry |= {
            "method": usage.method,
            "queue_s": round(usage.queue_s, 6),
            "first_token_s": round(trace.times.first_token_s, 6),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "large_share": round(usage.cost.large_share, 6),
        }
    elif trace.lease is not None and trace.lease.counts:
        entry["prompt_tokens"] = trace.lease.prompt_tokens
        entry["completion_tokens"] = trace.lease.sources.total()
    if texts:
        entry["prompt"] = _prompt(call)
        if isinstance(call, GenerateCall) and call.context:
            entry["context"] = call.context
    return entry


def _prompt(call: AnyCall) -> Any:
    if isinstance(call, GenerateCall) and call.messages is not None:
        return [{"role": message.role, "content": message.content} for message in call.messages]
    if isinstance(call, EmbedCall):
        return [each if isinstance(each, str) else list(each) for each in call.input]
    if isinstance(call, TaskCall):
        return {call.name: dict(call.params)}
    return call.prompt if isinstance(call.prompt, str) else list(call.prompt or ())
