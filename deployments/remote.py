"""A pool behind a Serve handle: the Backend that front ends use, with Ray's failures put into our terms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.backend import Batch
from turnout.calls import (
    Failure,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
)
from turnout.errors import Code, TurnoutError

CONTROL_TIMEOUT_S = 5.0


class RemoteBackend:
    """One pool deployment, seen from an ingress."""

    def __init__(self, name: str, handle: DeploymentHandle) -> None:
        self._name = name
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches as the replica sends them."""
        response = self._streaming.stream.remote(call)
        try:
            with self._translated():
                async for batch in response:
                    *events, last = batch
                    if isinstance(last, Failure):
                        if events:
                            yield tuple(events)
                        raise last.error
                    yield batch
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise

    async def complete(self, call: GenerateCall) -> Batch:
        """The whole answer at once."""
        answer: Batch = await self._ask(self._handle.complete.remote(call))
        return answer

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        answer: list[ScoredTokens] = await self._ask(self._handle.score.remote(call))
        return answer

    async def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        answers: list[list[ModelDescription]] = await self._ask_all("models")
        return answers[0]

    async def methods(self) -> list[MethodDescription]:
        """Decoding methods that the pool's code knows."""
        answers: list[list[MethodDescription]] = await self._ask_all("methods")
        return answers[0]

    async def stats(self) -> list[PoolStats]:
        """What each replica holds right now."""
        answers: list[PoolStats] = await self._ask_all("stats")
        return answers

    async def tokens(self, prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """A prompt as token ids and as text."""
        answer: tuple[tuple[int, ...], str] = await self._ask(self._handle.tokens.remote(prompt))
        return answer

    async def _ask(self, response: DeploymentResponse) -> Any:
        try:
            with self._translated():
                value = await response
        except asyncio.CancelledError:
            response.cancel()  # Serve does not do it for us where replicas talk over gRPC
            raise
        if isinstance(value, Failure):
            raise value.error
        return value

    async def _ask_all(self, method: str) -> list[Any]:
        """Ask every replica; such questions do not wait behind generations, even when the pool is full."""
        with self._translated():
            answers: list[Any] = await self._handle.broadcast(method).results_async(timeout_s=CONTROL_TIMEOUT_S)
        if not answers:
            raise TurnoutError(Code.UNAVAILABLE, f"pool {self._name!r} has no replica; try again later")
        return answers

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except BackPressureError:
            message = f"pool {self._name!r} has no room for another request; try again later"
            raise TurnoutError(Code.RESOURCE_EXHAUSTED, message) from None
        except (RayActorError, DeploymentUnavailableError):
            message = f"pool {self._name!r} lost the replica that worked on this; try again"
            raise TurnoutError(Code.UNAVAILABLE, message) from None
        except TimeoutError:
            raise TurnoutError(Code.UNAVAILABLE, f"pool {self._name!r} does not answer; try again") from None
        except (RequestCancelledError, TaskCancelledError):
            raise TurnoutError(Code.CANCELLED, "the request was cancelled") from None
