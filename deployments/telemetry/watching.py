"""One request as the ingress sees it, from its arrival to its end: times, outcome, the first span of its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deployments.metrics import Metrics, Times
from deployments.telemetry.request_log import RequestLog
from turnout import tracing
from turnout.calls import GenerateCall, ScoreCall, Usage
from turnout.errors import Code, TurnoutError

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True)
class Seen:
    """What was seen of a request.

    Attributes:
        call: as it came, then as it was admitted.
        kind: stream, generate or score.
        span: the trace's first one here; None: it is not traced.
        began: when it came, by `time.perf_counter`.
        first_s: when the first token was there, seconds later; 0.0: none was seen come.
        usage: what it took; None: it was not answered.
        outcome: OK, or a code.
        refusal: why it was refused or failed.
    """

    call: GenerateCall | ScoreCall
    kind: str
    span: Span | None = None
    began: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    usage: Usage | None = None
    outcome: str = "OK"
    refusal: TurnoutError | None = None

    def admitted(self, call: GenerateCall) -> GenerateCall:
        """The call as it goes on: in its span, or in none."""
        self.call = call = replace(call, trace=tracing.header_of(self.span))
        return call

    def first(self) -> None:
        """A part of the answer came."""
        if not self.first_s:
            self.first_s = time.perf_counter() - self.began

    @property
    def times(self) -> Times:
        """Of an answer, as seen here."""
        whole_s = time.perf_counter() - self.began
        assert self.usage is not None
        first_s = self.first_s or max(whole_s - (self.usage.wall_s - self.usage.ttft_s), 0.0)
        return Times(first_s, whole_s, self.call.sampling.n if isinstance(self.call, GenerateCall) else 1)


class Watch:
    """Counts, logs and traces the requests of an ingress.

    Args:
        metrics: counted there.
        log: written there; None: nowhere.
    """

    def __init__(self, metrics: Metrics, log: RequestLog | None = None) -> None:
        self._metrics = metrics
        self._log = log

    @contextmanager
    def over(self, call: GenerateCall | ScoreCall, kind: str, label: str, large: str = "") -> Iterator[Seen]:
        """A request is worked on for as long as the context lasts; what is raised in it is its outcome.

        Args:
            call: as it came.
            kind: stream, generate or score.
            label: the model it asks for, where there is one; "" for names that nobody knows.
            large: the large model of its pool.
        """
        given = call.trace if isinstance(call, GenerateCall) else ""
        seen = Seen(call, kind, tracing.root(kind, given, request_id=call.request_id, model=label))
        try:
            yield seen
        except TurnoutError as error:
            seen.outcome, seen.refusal = error.code.value, error
            raise
        except BaseException:  # a cancelled task or a closed generator; who has all of it may close it, too
            seen.outcome = "OK" if seen.usage is not None else Code.CANCELLED.value
            raise
        finally:
            self._ended(seen, label, large)

    def _ended(self, seen: Seen, label: str, large: str) -> None:
        tenant = seen.call.tenant
        self._metrics.finished(label, seen.outcome, tenant)
        if seen.refusal is not None:
            self._metrics.refused(seen.refusal)
        if seen.usage is not None:
            self._metrics.used(label, tenant, seen.usage, seen.times, large)
        if self._log is not None:
            self._log.write(_entry(seen, label, self._log.texts))
        tracing.end(seen.span, "" if seen.outcome == "OK" else seen.outcome, tenant=tenant, outcome=seen.outcome)


def _entry(seen: Seen, label: str, texts: bool) -> dict[str, Any]:
    call, usage = seen.call, seen.usage
    entry: dict[str, Any] = {
        "request_id": call.request_id,
        "tenant": call.tenant,
        "kind": seen.kind,
        "model": label,
        "outcome": seen.outcome,
        "wall_s": round(time.perf_counter() - seen.began, 6),
    }
    if seen.span is not None:
        entry["trace_id"] = tracing.trace_id(tracing.header_of(seen.span))
    if seen.refusal is not None and seen.refusal.field is not None:
        entry["field"] = seen.refusal.field[:100]
    if usage is not None:
        entry |= {
            "method": usage.method,
            "queue_s": round(usage.queue_s, 6),
            "first_token_s": round(seen.times.first_token_s, 6),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "large_share": round(usage.cost.large_share, 6),
        }
    if texts:
        entry["prompt"] = _prompt(call)
    return entry


def _prompt(call: GenerateCall | ScoreCall) -> Any:
    if isinstance(call, GenerateCall) and call.messages is not None:
        return [{"role": message.role, "content": message.content} for message in call.messages]
    return call.prompt if isinstance(call.prompt, str) else list(call.prompt or ())
