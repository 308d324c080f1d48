"""The wire-neutral service: which pool answers, deadlines, errors, metrics. Front ends only translate."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import uuid4

from deployments.backend import Backend, Batch
from deployments.faults import guarded, internal
from deployments.metrics import Metrics
from turnout.calls import (
    Chunk,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
    Usage,
)
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError, invalid, not_found
from turnout.registry import validated
from turnout.types import MAX_SEED, SamplingParams

MAX_REQUEST_ID_LENGTH = 128
MAX_SESSION_LENGTH = 256
HEALTH_TIMEOUT_S = 6.0  # a little longer than a pool waits for its replicas
ROLES = ("system", "user", "assistant")
Health = Literal["ok", "degraded", "unavailable"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation: one chunk per choice, in order."""

    choices: tuple[Chunk, ...]
    usage: Usage


def parse_sampling(values: Mapping[str, Any], prefix: str = "") -> SamplingParams:
    """Validate sampling parameters.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the parameter (after `prefix`) and what is allowed.
    """
    return validated(SamplingParams, values, prefix)


def request_id(given: str = "") -> str:
    """The caller's id when it is usable in a log line, a new one when absent.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if not given:
        return uuid4().hex
    if len(given) > MAX_REQUEST_ID_LENGTH or not given.isascii() or not given.isprintable():
        raise invalid("request_id", f"must be at most {MAX_REQUEST_ID_LENGTH} printable ASCII characters")
    return given


def session_name(given: str) -> str:
    """The caller's session.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too long.
    """
    if len(given) > MAX_SESSION_LENGTH:
        raise invalid("session", f"must be at most {MAX_SESSION_LENGTH} characters")
    return given


class GenerationService:
    """Everything that gRPC and HTTP have in common. All methods raise TurnoutError only."""

    def __init__(self, config: TurnoutConfig, backends: Mapping[str, Backend], metrics: Metrics) -> None:
        self._config = config
        self._backends = backends
        self.metrics = metrics
        self._pool_of = _pools_by_model(config)
        self._models: list[ModelDescription] | None = None
        self._methods: list[MethodDescription] | None = None

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches as they are written, the last one ending in Usage. Closing it cancels the request."""
        with self._counted(call.model, call.request_id):
            call, backend = self._admit(call)
            deadline = _Deadline(call.deadline_s)
            usage: Usage | None = None
            async with aclosing(backend.stream(call)) as batches:
                async for batch in deadline.over(batches):
                    if isinstance(batch[-1], Usage):
                        usage = batch[-1]
                    yield batch
            if usage is None:
                raise internal(call.request_id)
            self.metrics.used(call.model, call.tenant, usage)

    async def generate(self, call: GenerateCall) -> Answer:
        """The whole answer."""
        with self._counted(call.model, call.request_id):
            call, backend = self._admit(call)
            async with _Deadline(call.deadline_s).guard():
                *chunks, usage = await backend.complete(call)
            if not isinstance(usage, Usage):
                raise internal(call.request_id)
            self.metrics.used(call.model, call.tenant, usage)
            choices = sorted((chunk for chunk in chunks if isinstance(chunk, Chunk)), key=lambda chunk: chunk.index)
            return Answer(tuple(choices), usage)

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        with self._counted(call.model, call.request_id):
            model = self.model_name(call.model)
            if not call.completions:
                raise invalid("completions", "must not be empty")
            if not 0 <= call.top <= 20:
                raise invalid("top", f"must be from 0 to 20 (got {call.top})")
            async with self._limit():
                return await self._backend(model).score(replace(call, model=model))

    async def tokens(self, model: str, prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """A prompt as token ids and as text, in the tokenizer of the model's pool."""
        async with self._limit():
            return await self._backend(self.model_name(model)).tokens(prompt)

    async def models(self) -> list[ModelDescription]:
        """Each pool, then its members; a model of two pools is listed once. Fixed while we run."""
        if self._models is None:
            found: dict[str, ModelDescription] = {}
            for backend in self._backends.values():
                async with self._limit():
                    for model in await backend.models():
                        found.setdefault(model.name, model)
            self._models = list(found.values())
        return self._models

    async def methods(self) -> list[MethodDescription]:
        """Decoding methods; they are the same in every pool and do not change while we run."""
        if self._methods is None:
            async with self._limit():
                self._methods = await next(iter(self._backends.values())).methods()
        return self._methods

    async def stats(self) -> dict[str, list[PoolStats] | TurnoutError]:
        """What the replicas of each pool hold right now; of a pool that does not answer, why."""
        answers = await asyncio.gather(*(_stats(*each) for each in self._backends.items()))
        return dict(zip(self._backends, answers, strict=True))

    async def health(self) -> Health:
        """ok; degraded, every pool answers but some cannot reach its prefix store; or unavailable."""
        pools = await self.stats()
        answered = _answered(pools)
        if len(answered) < len(pools):
            return "unavailable"
        caches = [each.cache for stats in answered.values() for each in stats if each.cache is not None]
        return "ok" if all(cache.health == "ok" for cache in caches) else "degraded"

    async def exposition(self) -> bytes:
        """All metrics as text; what a pool counts is as of now, or of the last time it answered."""
        self.metrics.stores(_answered(await self.stats()))
        return self.metrics.render()

    def model_name(self, given: str) -> str:
        """Resolve a request's `model`; empty means the only pool.

        Raises:
            TurnoutError: NOT_FOUND, or INVALID_ARGUMENT where empty is ambiguous.
        """
        if given in self._pool_of:
            return given
        if given:
            raise not_found("model", given[:100], list(self._pool_of))
        if len(self._backends) == 1:
            return next(iter(self._backends))
        raise invalid("model", f"is needed here; pools: {', '.join(sorted(self._backends))}")

    def _limit(self) -> _Limit:
        """The longest that anything may take."""
        return _Deadline(self._config.server.request_timeout_s).guard()

    def _label(self, model: str) -> str:
        """The model's name for metrics; unknown names share the empty one, so that callers cannot make up series."""
        try:
            return self.model_name(model)
        except TurnoutError:
            return ""

    def _backend(self, model: str) -> Backend:
        return self._backends[self._pool_of[model]]

    def _admit(self, call: GenerateCall) -> tuple[GenerateCall, Backend]:
        model = self.model_name(call.model)
        _check_input(call)
        limit_s = self._config.server.request_timeout_s
        wanted_s = limit_s if call.deadline_s is None else call.deadline_s
        if not (math.isfinite(wanted_s) and wanted_s > 0):
            raise invalid("deadline_s", f"must be a positive number of seconds (got {wanted_s})")
        sampling = call.sampling
        if sampling.seed is None:
            # Here, and not where it is used: so the call can be made again and gives the same answer.
            sampling = sampling.model_copy(update={"seed": secrets.randbelow(MAX_SEED)})
        deadline_s = min(wanted_s, limit_s)
        return replace(call, model=model, sampling=sampling, deadline_s=deadline_s), self._backend(model)

    @contextmanager
    def _counted(self, model: str, call_id: str) -> Iterator[None]:
        label = self._label(model)
        outcome = "OK"
        try:
            with guarded(call_id):
                yield
        except TurnoutError as error:
            outcome = error.code.value
            raise
        except BaseException:  # a cancelled task or a closed generator
            outcome = Code.CANCELLED.value
            raise
        finally:
            self.metrics.finished(label, outcome)


async def _stats(name: str, backend: Backend) -> list[PoolStats] | TurnoutError:
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            return await backend.stats()
    except TimeoutError:
        return TurnoutError(Code.UNAVAILABLE, f"pool {name!r} does not answer within {HEALTH_TIMEOUT_S:g} s")
    except TurnoutError as error:
        return error


def _answered(pools: Mapping[str, list[PoolStats] | TurnoutError]) -> dict[str, list[PoolStats]]:
    return {name: stats for name, stats in pools.items() if not isinstance(stats, TurnoutError)}


def _pools_by_model(config: TurnoutConfig) -> dict[str, str]:
    found = {name: name for name in config.pools}
    for name, pool in config.pools.items():
        for member in (pool.small, pool.large):
            found.setdefault(member, name)
    return found


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


class _Deadline:
    """One point in time for a whole request, queueing included."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def over(self, batches: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
        """The same batches; the clock runs while we wait for them, not while the client reads."""
        while True:
            async with self.guard():
                try:
                    batch = await anext(batches)
                except StopAsyncIteration:
                    return
            yield batch

    def guard(self) -> _Limit:
        """Raise DEADLINE_EXCEEDED when the block is still waiting at the deadline."""
        return _Limit(self._at, self._seconds)


class _Limit:
    def __init__(self, at: float | None, seconds: float | None) -> None:
        self._timeout = asyncio.timeout_at(at)
        self._seconds = seconds

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            message = f"deadline_s: the call took longer than {self._seconds:g} s"
            raise TurnoutError(Code.DEADLINE_EXCEEDED, message, "deadline_s") from None
