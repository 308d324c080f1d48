"""A pool behind a Serve handle: the Backend that front ends use. Calls of a lost replica continue in another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.backend import Batch, merge
from deployments.retry import Attempts, LostError, Replay, SerialGate
from deployments.serve_internals import cancel, request_router
from turnout.calls import (
    AUTO,
    Event,
    Failure,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
    Usage,
)
from turnout.config import StickyConfig
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import Code, Interrupted, TurnoutError, busy
from turnout.tenant_lru import SessionKey, Sessions
from turnout.tracing import begin, end, header_of

CONTROL_TIMEOUT_S = 5.0
# How a stream may end whose other end is gone; Serve translates the first of them only.
BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
)
UNEXPECTED = tuple(f"Unexpected error ({code})" for code in BROKEN)


class RemoteBackend:
    """One pool deployment, seen from an ingress.

    A call whose replica is lost is made again, with its seed, the decision taken about it, and what the client has:
    the client sees a pause. Where sessions keep a decision, a call takes its session's along: whichever replica it goes
    to, it is answered as those before it. All calls are made from one event loop, with a deadline of the caller's.

    Args:
        name: the pool's.
        handle: its deployment's.
        routed: whether the pool decides how calls that leave it open are answered.
        sticky: how long sessions keep what was decided; None: they do not.
        sleeps: whether the pool may have no replica while it is idle.
    """

    def __init__(
        self,
        name: str,
        handle: DeploymentHandle,
        routed: bool = False,
        sticky: StickyConfig | None = None,
        sleeps: bool = False,
    ) -> None:
        self._name = name
        self._handle = handle
        # Serve's usual way of pickling looks at each object in Python.
        self._streaming = handle.options(stream=True, response_serialization="pickle")
        self._routed = routed
        self._sessions = Sessions(sticky) if sticky is not None else None
        self._sleeps = sleeps
        self._gate = SerialGate()

    def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Return batches as the replica sends them, each token once, whatever becomes of the replica."""
        return self._stream(replace(call, include_decision=self._routed))

    async def complete(self, call: GenerateCall) -> Batch:
        """The whole answer at once."""
        with self._spanned(replace(call, include_decision=self._routed)) as asked:
            return await self._complete(asked, self._replay(asked))

    def _replay(self, call: GenerateCall) -> Replay:
        """All attempts of a call, the first one with what its session keeps."""
        if self._sessions is None or call.method not in (None, AUTO) or call.model != self._name:
            return Replay(call, self._name)
        key = SessionKey(call.tenant, call.session, call.limits)
        call = replace(call, decided=self._sessions.recall(key))
        return Replay(call, self._name, on_decision=partial(self._sessions.remember, key, call.request_id))

    async def _complete(self, call: GenerateCall, replay: Replay) -> Batch:
        collected: list[Event] = []
        try:
            *events, last = await self._ask(self._handle.complete.remote(replay.call))
            if not isinstance(last, Failure):
                return replay.take((*events, last))
            collected += replay.take(tuple(events), collected=True)
            raise _raised(last, self._name)
        except LostError as loss:
            replay.lost(loss)
        # As a stream: whether a quarantined call makes progress is seen before it is done.
        async with aclosing(self._stream(call, replay)) as batches:
            async for batch in batches:
                collected += batch
        return merge(collected)

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        answer: list[ScoredTokens] = await self._replayed(call.request_id, lambda: self._handle.score.remote(call))
        return answer

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings of texts."""
        answer: Embeddings = await self._replayed(call.request_id, lambda: self._handle.embed.remote(call))
        return answer

    async def task(self, call: TaskCall) -> TaskAnswer:
        """Carry out a task."""
        answer: TaskAnswer = await self._replayed(call.request_id, lambda: self._handle.task.remote(call))
        return answer

    async def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        answer: list[ModelDescription] = await self._replayed("models", self._handle.models.remote)
        return answer

    async def methods(self) -> list[MethodDescription]:
        """Decoding methods that the pool's code knows."""
        answer: list[MethodDescription] = await self._replayed("methods", self._handle.methods.remote)
        return answer

    async def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        """JSON schemas of the parts that the pool's code knows: by slot, then by name."""
        answer: dict[str, dict[str, Any]] = await self._replayed("parts", lambda: self._handle.parts.remote(slots))
        return answer

    async def stats(self) -> list[PoolStats]:
        """What each replica holds right now; nothing where the pool sleeps."""
        # Such questions do not wait behind generations, even when the pool is full.
        try:
            with self._translated():
                answers = await self._handle.broadcast("stats").results_async(
                    timeout_s=CONTROL_TIMEOUT_S, return_exceptions=True
                )
        except TurnoutError:
            if self._sleeps:
                return []
            raise
        found = [answer for answer in answers if isinstance(answer, PoolStats)]
        if not found and not self._sleeps:
            raise TurnoutError(Code.UNAVAILABLE, f"pool {self._name!r} has no replica; try again later")
        return found

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str]:
        """What a call gives its models to read, as token ids and as text."""
        answer: tuple[tuple[int, ...], str] = await self._replayed("tokens", lambda: self._handle.tokens.remote(call))
        return answer

    async def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts, in every replica; those that have ended know nothing."""
        if self._sessions is not None:
            self._sessions.forget(tenant)
        try:
            with self._translated():
                asked = self._handle.broadcast("forget", tenant)
                answers = await asked.results_async(timeout_s=CONTROL_TIMEOUT_S, return_exceptions=True)
        except TurnoutError:
            if not self._sleeps:
                raise
            return
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, RayActorError):
                message = f"a replica of pool {self._name!r} did not answer ({type(answer).__name__})"
                raise TurnoutError(Code.UNAVAILABLE, message)

    @contextmanager
    def _spanned(self, call: GenerateCall) -> Iterator[GenerateCall]:
        """The call in a span for the choice of a replica and all attempts; in none where it is not traced."""
        span = begin(f"replica of {self._name}", call.trace)
        if span is None:
            yield call
            return
        try:
            yield replace(call, trace=header_of(span))
        finally:
            end(span)

    async def _stream(self, call: GenerateCall, replay: Replay | None = None) -> AsyncGenerator[Batch, None]:
        """Stream all attempts of a call as one answer.

        Args:
            call: as it is asked.
            replay: its attempts so far, which its caller traces; None: there are none yet.
        """
        with self._spanned(call) if replay is None else nullcontext(call) as asked:
            replay = replay or self._replay(asked)
            while True:
                await asyncio.sleep(replay.attempts.pause_s)
                async with self._gate.turn(replay.attempts) as turn:
                    response = self._streaming.stream.remote(replay.call)
                    answered = False
                    try:
                        with self._translated():
                            async for batch in response:
                                *events, last = replay.take(batch) or (None,)
                                if replay.attempts.gets_on:
                                    turn.over()
                                answered = isinstance(last, Usage)
                                if isinstance(last, Failure):
                                    if events:
                                        yield tuple(events)
                                    raise _raised(last, self._name)
                                if last is not None:
                                    yield (*events, last)
                        if not answered:
                            raise LostError(f"a replica of {self._name!r}")
                        return
                    except LostError as loss:
                        # The end of a replica after its last event is no loss.
                        if answered:
                            return
                        replay.lost(loss, turn.lasts)
                    except TurnoutError as error:
                        # It was let in before: where there is no room for it now, it waits.
                        if error.code is not Code.RESOURCE_EXHAUSTED or not replay.attempts.num_lost:
                            raise
                        replay.attempts.refused()
                    except (asyncio.CancelledError, GeneratorExit):
                        cancel(response)
                        raise

    async def _replayed(self, request_id: str, ask: Callable[[], DeploymentResponse]) -> Any:
        """Ask one replica, and another one where it is lost."""
        attempts = Attempts(request_id, self._name)
        while True:
            await asyncio.sleep(attempts.pause_s)
            async with self._gate.turn(attempts):
                try:
                    return await self._ask(ask())
                except LostError as loss:
                    attempts.lost(loss)
                except TurnoutError as error:
                    if error.code is not Code.RESOURCE_EXHAUSTED or not attempts.num_lost:
                        raise
                    attempts.refused()

    async def _ask(self, response: DeploymentResponse) -> Any:
        try:
            with self._translated():
                value = await response
        except asyncio.CancelledError:
            cancel(response)  # Serve does not do it for us where replicas talk over gRPC
            raise
        if isinstance(value, Failure):
            raise _raised(value, self._name)
        return value

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except BackPressureError:
            raise busy(f"pool {self._name!r} has no room for another request") from None
        except DeploymentUnavailableError:
            message = f"pool {self._name!r} has no replica, and none is coming; try again later"
            raise TurnoutError(Code.UNAVAILABLE, message) from None
        except RayActorError as error:
            raise self._lost(error.actor_id or "") from None
        except grpc.RpcError as error:
            if error.code() not in BROKEN:
                raise
            raise self._lost("") from None
        except RuntimeError as error:
            # What Serve makes of a stream that broke before it began.
            if not str(error).startswith(UNEXPECTED):
                raise
            raise self._lost("") from None
        except TimeoutError:
            raise TurnoutError(Code.UNAVAILABLE, f"pool {self._name!r} does not answer; try again") from None
        except (RequestCancelledError, TaskCancelledError):
            raise TurnoutError(Code.CANCELLED, "the request was cancelled") from None

    def _lost(self, actor_id: str) -> LostError:
        """A replica's process has ended, or cannot be reached."""
        router = _request_router(self._handle)
        stopping = router is not None and router.retired(actor_id)
        place = router.place(actor_id) if router is not None and actor_id else ""
        named = f"replica {actor_id[:8]}" if actor_id else "a replica"
        return LostError(f"{named} on {place}" if place else named, blameless=stopping)


def _raised(failure: Failure, pool: str) -> Exception:
    """A failure that came as a value: the error of the caller, or a reason to ask another replica."""
    error = failure.error
    if isinstance(error, Interrupted):
        # The replica finds out itself which call ended a process of its models.
        return LostError(f"a replica of {pool!r}: {error.message}", error.moved, blameless=True)
    return error


def _request_router(handle: DeploymentHandle) -> Any:
    """Return the pool's `PrefixRouter` in this process, once a call has been made."""
    router = request_router(handle)
    return router if hasattr(router, "retired") else None
