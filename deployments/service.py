"""The wire-neutral service: which pool answers, deadlines, errors, metrics. Front ends only translate."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deployments.access.admission import Admission
from deployments.access.callers import Caller, Callers, RemovedTenants
from deployments.access.lease import Lease
from deployments.access.shared_limits import open_shared_limits
from deployments.access.tarpit import Tarpit
from deployments.backend import Backend, Batch, merge
from deployments.deadline import Deadline, Limit
from deployments.faults import guarded, internal
from deployments.health import Health, HealthReport
from deployments.listings import Listings
from deployments.metrics import Metrics
from deployments.model_names import ModelNames
from deployments.pool_health import PoolHealth
from deployments.reading import check_read
from deployments.request_fields import ROLES
from deployments.responses.store import open_responses
from deployments.telemetry.exposition import Exposition
from deployments.telemetry.request_log import RequestLog
from deployments.telemetry.request_trace import RequestTrace, RequestTracer
from turnout import tracing
from turnout.access_config import UNLIMITED, TenantLimits
from turnout.calls import (
    Chunk,
    Event,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
    Usage,
)
from turnout.config import TurnoutConfig
from turnout.embed_calls import AnyCall, EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import TurnoutError, invalid
from turnout.message_size import MOST_UNITS, units
from turnout.types import MAX_SEED

R = TypeVar("R", ScoreCall, EmbedCall, TaskCall)


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation: one chunk per choice, in order."""

    choices: tuple[Chunk, ...]
    usage: Usage


class GenerationService:
    """Everything that gRPC and HTTP have in common. All methods raise TurnoutError only.

    Attributes:
        max_body_bytes: of the largest request.
        cors_origins: origins whose pages may call over HTTP.
        exposition: what a scrape gets.
    """

    def __init__(
        self, config: TurnoutConfig, backends: Mapping[str, Backend], metrics: Metrics, log: RequestLog | None = None
    ) -> None:
        self._config = config
        self.max_body_bytes = config.server.max_body_bytes
        self.cors_origins = config.server.cors_origins
        self.console = config.console
        self.batches = config.batches
        self.responses = open_responses(config)
        self.ignored_tools = config.responses.ignored_tools
        self._backends = backends
        self.metrics = metrics
        self.callers = Callers(config.access)
        metrics.known_tenant = self.callers.knows
        self.admission = Admission(config, self.callers)
        self._shared = open_shared_limits(config)
        self._tarpit = Tarpit()
        self._removed = RemovedTenants(self.callers, backends)
        self._health = PoolHealth(backends)
        self.tracer = RequestTracer(metrics, log, config.server.request_timeout_s)
        self._log = log
        self.exposition = Exposition(metrics, self._health.answered, self.held, self.callers, log)
        self._names = ModelNames(config.pools)
        self._listings = Listings(backends, self._limit)

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches as they are written, the last one ending in Usage. Closing it cancels the request."""
        shows_prompt_len = call.include_prompt_len
        with self._traced(call, "stream") as trace:
            call, pool = self._admit(call)
            call = trace.admitted(call)
            deadline = Deadline(call.deadline_s)
            usage: Usage | None = None
            async with (
                self._let_in(call, pool) as lease,
                aclosing(self._backends[pool].stream(call)) as batches,
                aclosing(deadline.over(batches)) as timed,
            ):
                trace.lease = lease
                async for batch in timed:
                    served = lease.served(batch)
                    shown = batch if shows_prompt_len else served
                    trace.sent(shown)
                    if isinstance(batch[-1], Usage):
                        usage = trace.usage = batch[-1]
                    if shown:
                        yield shown
            if usage is None:
                raise internal(call.request_id)

    async def generate(self, call: GenerateCall) -> Answer:
        """The whole answer."""
        with self._traced(call, "generate") as trace:
            call, pool = self._admit(call)
            call = trace.admitted(call)
            async with self._let_in(call, pool) as lease, Deadline(call.deadline_s).guard():
                trace.lease = lease
                *chunks, usage = await _whole(self._backends[pool], call, lease)
            if not isinstance(usage, Usage):
                raise internal(call.request_id)
            trace.usage = usage
            trace.finished(chunks)
            choices = sorted((chunk for chunk in chunks if isinstance(chunk, Chunk)), key=lambda chunk: chunk.index)
            return Answer(tuple(choices), usage)

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        async with self._reading(call, "score") as (call, backend, lease):
            scored = await backend.score(call)
            read = scored if call.prompts else scored[:1]
            lease.scored(sum(each.prompt_tokens for each in read) + sum(len(each.tokens) for each in scored))
            return scored

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings of texts."""
        async with self._reading(call, "embed") as (call, backend, lease):
            made = await backend.embed(call)
            lease.scored(sum(made.prompt_tokens))
            return made

    async def task(self, call: TaskCall) -> TaskAnswer:
        """Carry out a task; of one that fails, what it read is billed as well."""
        async with self._reading(call, "task") as (call, backend, lease):
            try:
                made = await backend.task(call)
            except TurnoutError as error:
                if error.prompt_tokens:
                    lease.scored(error.prompt_tokens)
                raise
            lease.scored(made.prompt_tokens)
            return made

    @asynccontextmanager
    async def _reading(self, call: R, kind: str) -> AsyncGenerator[tuple[R, Backend, Lease], None]:
        """A call that only reads, settled and let in, and the pool that it goes to."""
        with self._traced(call, kind):
            limits = self.callers.limits(call.tenant)
            model = self.model_name(call.model, limits)
            pool = self._names.pool(model, limits)
            check_read(call)
            deadline = Deadline(_deadline(call, self._config.server.request_timeout_s))
            call = replace(call, model=model, sharing=self.callers.sharing(call.tenant))
            async with self._let_in(call, pool) as lease, deadline.guard():
                yield call, self._backends[pool], lease

    async def precheck(self, caller: Caller) -> None:
        """Refuse a request that could not be let in now, before it is looked at.

        Raises:
            TurnoutError: RESOURCE_EXHAUSTED.
        """
        try:
            self.admission.precheck(caller)
        except TurnoutError as error:
            await self._tarpit.hold(caller.tenant, error)
            raise

    async def check(self, calls: Sequence[GenerateCall]) -> None:
        """Refuse calls of one request that could not all be let in now, before any of them has begun.

        Raises:
            TurnoutError: see `Admission.check`.
        """
        with self.tracer.refusing(calls[0].tenant, calls[0].request_id, calls[0].key_id):
            try:
                self.admission.check(calls)
            except TurnoutError as error:
                await self._tarpit.hold(calls[0].tenant, error)
                raise

    @asynccontextmanager
    async def _let_in(self, call: AnyCall, pool: str) -> AsyncGenerator[Lease, None]:
        """A request that is let in; where limits or the pool have no room for it, its tenant may have to wait."""
        await self._removed.settled(call.tenant)
        try:
            with self.admission.admit(call, pool) as lease:
                if self._shared is None or not lease.counts:
                    yield lease
                    return
                async with self._shared.hold(lease, self.callers.limits(call.tenant)):
                    yield lease
        except TurnoutError as error:
            if self.admission.counts:
                await self._tarpit.hold(call.tenant, error)
            raise

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str]:
        """What a call gives its models to read, as token ids and as text; nothing is computed."""
        limits = self._limits(call)
        pool = self._names.pool(self.model_name(call.model, limits), limits)
        _check_input(call)
        async with self._limit():
            return await self._backends[pool].tokens(call)

    async def models(self) -> list[ModelDescription]:
        """Each pool, then its members; see `Listings.models`."""
        return await self._listings.models()

    async def methods(self) -> list[MethodDescription]:
        """Decoding methods; see `Listings.methods`."""
        return await self._listings.methods()

    async def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        """JSON schemas of the parts in slots, by slot and name; see `Listings.parts`."""
        return await self._listings.parts(slots)

    async def stats(self) -> dict[str, list[PoolStats] | TurnoutError]:
        """What the replicas of each pool hold right now; of a pool that does not answer, why."""
        return await self._health.stats()

    async def health(self) -> Health:
        """ok; degraded, every pool answers but some cannot reach its prefix store; or unavailable."""
        return (await self.health_report()).status

    async def health_report(self) -> HealthReport:
        """Return the health of all pools, with the reason where the store is degraded.

        As of now, or of a second ago: anybody may ask, without a key, and it goes to every replica.
        """
        return await self._health.report()

    def held(self) -> dict[str, int]:
        """What there is of requests just now, by one of INGRESS_STATES; without limits and records, refusals alone."""
        return {**self.admission.held(), "refused": self._tarpit.num_held}

    async def models_for(self, caller: Caller) -> list[ModelDescription]:
        """Those that a caller may ask."""
        return [each for each in await self.models() if self._names.allowed(each.name, caller.limits)]

    def close(self) -> None:
        """Write what is not written yet: usage, log and spans."""
        if self._shared is not None:
            self._shared.close()
        self.admission.close()
        self.callers.close()
        if self.responses is not None:
            self.responses.place.close()
        if self._log is not None:
            self._log.close()
        tracing.flush()

    def model_name(self, given: str, limits: TenantLimits = UNLIMITED) -> str:
        """Resolve a request's `model`, see `ModelNames.resolved`."""
        return self._names.resolved(given, limits)

    def _limits(self, call: GenerateCall) -> TenantLimits:
        return self.callers.limits(call.tenant) if call.billed else UNLIMITED

    def _limit(self) -> Limit:
        """The longest that anything may take."""
        return Deadline(self._config.server.request_timeout_s).guard()

    def _admit(self, call: GenerateCall) -> tuple[GenerateCall, str]:
        """The call with everything settled, and the pool it goes to."""
        limits = self._limits(call)
        model = self.model_name(call.model, limits)
        _check_input(call)
        deadline_s = _deadline(call, self._config.server.request_timeout_s)
        sampling = call.sampling
        if sampling.seed is None:
            # Here, and not where it is used: so the call can be made again and gives the same answer.
            sampling = sampling.model_copy(update={"seed": secrets.randbelow(MAX_SEED)})
        counts = call.include_prompt_len or (self.admission.counts and call.billed)
        sharing = self.callers.sharing(call.tenant)  # whatever the call says: its tenant does not decide that
        call = replace(call, model=model, sampling=sampling, deadline_s=deadline_s, include_prompt_len=counts)
        return replace(call, sharing=sharing), self._names.pool(model, limits)

    @contextmanager
    def _traced(self, call: AnyCall, kind: str) -> Iterator[RequestTrace]:
        label = self._names.label(call.model)
        large = self._config.pools[self._names.pool(label)].large if label else ""
        with self.tracer.over(call, kind, label, large) as trace, guarded(call.request_id):
            yield trace


async def _whole(backend: Backend, call: GenerateCall, lease: Lease) -> Batch:
    """A whole answer: in large parts where it may be too much for one message, or counts, also what is cut short."""
    sampling = call.sampling
    if not lease.counts and units(sampling.n * sampling.max_tokens, sampling.logprobs) <= MOST_UNITS:
        return await backend.complete(call)
    events: list[Event] = []
    async with aclosing(backend.stream(replace(call, whole=True))) as batches:
        async for batch in batches:
            events += lease.served(batch)
    return merge(events)


def _deadline(call: AnyCall, limit_s: float) -> float:
    """Seconds that a call may take."""
    wanted_s = limit_s if call.deadline_s is None else call.deadline_s
    if not (math.isfinite(wanted_s) and wanted_s > 0):
        raise invalid("deadline_s", f"must be a positive number of seconds (got {wanted_s})")
    # A batch has its own deadline: its requests may wait longer than any client would.
    return wanted_s if call.batch_id else min(wanted_s, limit_s)


def _check_input(call: GenerateCall) -> None:
    if call.messages is not None:
        if not call.messages:
            raise invalid("messages", "must not be empty")
        for place, message in enumerate(call.messages):
            if message.role not in ROLES:
                allowed = ", ".join(ROLES)
                raise invalid(f"messages.{place}.role", f"must be one of {allowed} (got {message.role[:40]!r})")
    elif call.prompt is None:
        raise invalid("prompt", "is needed: text, token ids or messages")
    elif not call.prompt:
        raise invalid("prompt", "must not be empty")
