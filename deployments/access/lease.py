"""Admission lease of one request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from deployments.access.buckets import Bucket
from deployments.backend import Batch
from turnout.calls import Begun, Chunk, Priority, Usage
from turnout.embed_calls import AnyCall
from turnout.errors import Code, TurnoutError

if TYPE_CHECKING:
    from deployments.access.admission import Admission

# Refusals that come before anything is computed: what was charged for tokens is given back.
NOTHING_DONE = (
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.NOT_FOUND,
    Code.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE,
    Code.PERMISSION_DENIED,
)
# Those of them that are no fault of the caller's: the request does not count either.
NO_ROOM = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE)


BATCH_RATE_KEPT = 0.5  # share of a rate that batches leave alone


def kept_of(priority: Priority) -> float:
    """Return the share of a rate that is left alone: a tenant's batches leave half to its other requests."""
    return BATCH_RATE_KEPT if priority == "batch" else 0.0


@dataclass(slots=True)
class Account:
    """What one tenant uses just now; `running` are its requests by priority, `reading` those whose bodies come.

    `held` are the tokens of running requests by their model, as far as they are known or estimated.
    """

    running: Counter[str] = field(default_factory=Counter)
    reading: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)


class Lease:
    """Lease of one admitted request; what it uses is counted until the context ends.

    Attributes:
        account: its tenant's; None: nothing is counted.
        charged: tokens that count against its rate.
        began: when it was let in, by the admission's clock.
        sources: tokens that were written, as far as they came here, by the model that wrote them.
        prompt_tokens: those that were read, once it is known.
        stream_tokens: those of the prompts of its contrast's streams, likewise.
        usage: what it used in all, once it is known.
    """

    def __init__(
        self,
        admission: Admission | None,
        call: AnyCall,
        account: Account | None,
        estimate: int,
        began: float,
    ) -> None:
        self._admission = admission
        self._done = False
        self.charged = estimate
        self.began = began
        self.call = call
        self.account = account
        self.sources: Counter[str] = Counter()
        self.prompt_tokens = self.stream_tokens = 0
        self.usage: Usage | None = None

    @property
    def counts(self) -> bool:
        """Whether anything is."""
        return self._admission is not None

    @property
    def priority(self) -> Priority:
        """Of its call."""
        return self.call.priority

    @property
    def kept(self) -> float:
        """Share of its tenant's rates that it leaves alone: batches leave half to the other requests."""
        return kept_of(self.priority)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was let in."""
        return self._admission.elapsed_s(self) if self._admission is not None else 0.0

    def served(self, batch: Batch) -> Batch:
        """What of a batch is for the client, counted as sent."""
        if self._admission is None:
            return batch
        begun = False
        for event in batch:
            if isinstance(event, Chunk):
                for token in event.tokens:
                    self.sources[token.source] += 1
            elif isinstance(event, Usage):
                self.usage = event
            elif isinstance(event, Begun):
                self.prompt_tokens, self.stream_tokens, begun = event.prompt_tokens, event.stream_tokens, True
        self._charge()
        return tuple(event for event in batch if not isinstance(event, Begun)) if begun else batch

    def scored(self, prompt_tokens: int) -> None:
        """Count the tokens read for scores or embeddings."""
        if self._admission is None:
            return
        self.prompt_tokens = prompt_tokens
        self._charge()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._admission is None or self._done:
            return
        self._done = True
        tokens, requests = self.unused(error)
        if tokens or requests:
            assert self.account is not None
            self._admission.charge(self.call.tenant, self.account, -tokens, -requests)
        self._admission.ended(self, self._outcome(error))

    def unused(self, error: BaseException | None) -> tuple[int, int]:
        """Return the tokens and the requests that were charged and are given back.

        Args:
            error: that ended the request.
        """
        nothing = not self.sources and not self.prompt_tokens and self.usage is None
        if isinstance(error, TurnoutError) and error.code in NOTHING_DONE and nothing:
            return self.charged, int(error.code in NO_ROOM)
        return 0, 0

    def _outcome(self, error: BaseException | None) -> str:
        if error is None or self.usage is not None:
            return "OK"
        if isinstance(error, TurnoutError):
            return error.code.value
        return Code.INTERNAL.value if isinstance(error, Exception) else Code.CANCELLED.value

    def _charge(self) -> None:
        """Settle the estimate as more becomes known; what was cut short keeps it."""
        assert self._admission is not None
        assert self.account is not None
        if self.usage is not None:
            used = self.usage.prompt_tokens + self.stream_tokens + self.usage.completion_tokens
        else:
            read = self.prompt_tokens + self.stream_tokens if self.prompt_tokens else self.charged
            used = max(read + sum(self.sources.values()), self.charged)
        if used != self.charged:
            self._admission.charge(self.call.tenant, self.account, used - self.charged)
            self.account.held[self.call.model] += used - self.charged
            self.charged = used
