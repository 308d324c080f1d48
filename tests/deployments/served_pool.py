"""One pool on the session's cluster, without ingress and proxies: asked through a RemoteBackend of the test's own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from ray import serve

from deployments.app import QUIET, pool_app
from deployments.pool_deployment import PoolLoader
from deployments.remote import RemoteBackend
from tests.deployments.conftest import poll
from turnout.calls import Chunk, GenerateCall, PoolStats, TokenOut, Usage
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError
from turnout.types import SamplingParams


@dataclass
class Got:
    """What a client has of one call."""

    tokens: list[TokenOut] = field(default_factory=list)
    text: str = ""
    usage: Usage | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def sources(self) -> list[str]:
        """Which processes wrote it, in order."""
        return list(dict.fromkeys(token.source for token in self.tokens))


@dataclass
class ServedPool:
    app: str
    name: str
    config: TurnoutConfig
    load: PoolLoader
    backend: RemoteBackend

    def run(self, config: TurnoutConfig) -> None:
        """Serve another configuration."""
        try:
            serve.run(pool_app(self.name, config, self.load), name=self.app, route_prefix=None, logging_config=QUIET)
        except RuntimeError as error:
            deployments = serve.status().applications[self.app].deployments
            raise AssertionError([each.message for each in deployments.values()]) from error

    async def stats(self) -> list[PoolStats]:
        try:
            return await self.backend.stats()
        except TurnoutError:  # there is none just now
            return []

    async def pids(self) -> list[int]:
        return sorted(pid_of(each.place) for each in await self.stats())

    async def requests(self) -> int:
        return sum(each.requests for each in await self.stats())

    async def wait_for_replicas(self, count: int, timeout_s: float = 60.0) -> list[int]:
        async def there() -> bool:
            return len(await self.stats()) == count

        await until(there, f"{count} replicas", timeout_s)
        return await self.pids()


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 30.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not await condition():
        assert loop.time() < deadline, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(0.02)


def pid_of(place: str) -> int:
    return int(place.rpartition("pid ")[2])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def call(prompt: str, request_id: str = "r", max_tokens: int = 20, seed: int = 5, **changes: object) -> GenerateCall:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, n=int(str(changes.pop("n", 1))))
    values: dict[str, object] = {"model": "p", "prompt": prompt, "deadline_s": 60.0, **changes}
    return GenerateCall(request_id=request_id, sampling=sampling, **values)  # type: ignore[arg-type]


async def read(
    backend: RemoteBackend, asked: GenerateCall, after: Callable[[Got], Awaitable[None]] | None = None
) -> dict[int, Got]:
    """A call's answers by index; `after` is called with the first answer after each batch."""
    got: dict[int, Got] = {index: Got() for index in range(asked.sampling.n)}
    async with aclosing(backend.stream(asked)) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Chunk):
                    answer = got[event.index]
                    answer.tokens += event.tokens
                    answer.text += event.text
                    if event.finish_reason is not None:
                        answer.reasons.append(event.finish_reason)
                else:
                    assert isinstance(event, Usage), event
                    for answer in got.values():
                        answer.usage = event
            if after is not None:
                await after(got[0])
    return got


async def read_one(
    backend: RemoteBackend, asked: GenerateCall, after: Callable[[Got], Awaitable[None]] | None = None
) -> Got:
    return (await read(backend, asked, after))[0]


def kill_after(num_tokens: int) -> Callable[[Got], Awaitable[None]]:
    """Kills the process that writes, once, when so many tokens have come."""
    done = False

    async def after(got: Got) -> None:
        nonlocal done
        if not done and len(got.tokens) >= num_tokens:
            done = True
            kill(pid_of(got.tokens[-1].source))
            await asyncio.sleep(0)

    return after


@contextmanager
def served_pool(
    app: str, config: TurnoutConfig, load: PoolLoader, name: str = "p", routed: bool = False
) -> Iterator[ServedPool]:
    """Serve pool `name` until the context ends. The session's cluster must run."""
    pool = ServedPool(app, name, config, load, None)  # type: ignore[arg-type]
    pool.run(config)
    try:
        settings = config.pools[name]
        sleeps = settings.autoscaling is not None and settings.autoscaling.min_replicas == 0
        handle = serve.get_deployment_handle(f"pool-{name}", app)
        sticky = settings.routing.sticky if settings.routing is not None else None
        pool.backend = RemoteBackend(name, handle, routed=routed, sticky=sticky, sleeps=sleeps)
        yield pool
    finally:
        serve.delete(app, _blocking=False)
        poll(lambda: app not in serve.status().applications, "the application is gone", 60.0)
