"""Asking a served pool and watching its replicas, for `benchmarks.bench_scaling`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from turnout.client import AsyncClient
from turnout.errors import TurnoutError

WATCH_S = 0.25


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: seconds from when it was due, tokens, or the code it failed with."""

    due_s: float
    ttft_s: float = 0.0
    end_to_end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


async def ask(
    client: AsyncClient, prompt: str, due_s: float, now: Callable[[], float], max_tokens: int, **options: Any
) -> Asked:
    """Ask once, greedily, and read to the end."""
    first_s = -1.0
    stream = client.stream(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)
    try:
        async with stream as chunks:
            async for chunk in chunks:
                if chunk.tokens and first_s < 0:
                    first_s = now()
    except TurnoutError as error:
        return Asked(due_s, error=error.code.value)
    usage = stream.usage
    if first_s < 0 or usage is None:
        return Asked(due_s, error="NO_OUTPUT")
    return Asked(due_s, first_s - due_s, now() - due_s, usage.prompt_tokens, usage.cached_tokens)


@dataclass(frozen=True, slots=True)
class Seen:
    """Replicas at one moment, seconds since the watch began: how many, and the process and calls of each."""

    at_s: float
    replicas: int
    calls: dict[int, int]


class Watch:
    """Watch of a pool's replicas through GET /status, in a task.

    Args:
        url: of the server's HTTP endpoint.
        pool: its name.
    """

    def __init__(self, url: str, pool: str) -> None:
        self.seen: list[Seen] = []
        self._url, self._pool = f"{url}/status", pool
        self._start = time.monotonic()
        self._task = asyncio.create_task(self._look())

    def now(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._start

    async def _look(self) -> None:
        async with httpx.AsyncClient(timeout=10.0) as client:
            while True:
                try:
                    said = (await client.get(self._url)).json()["pools"][self._pool]
                except (httpx.HTTPError, KeyError, ValueError):
                    said = None  # it is being looked at again in a moment
                if said is not None:
                    calls = {process_id(each["place"]): each["requests"] for each in said}
                    self.seen.append(Seen(self.now(), len(said), calls))
                await asyncio.sleep(WATCH_S)

    async def until(self, replicas: int, since_s: float, limit_s: float) -> float | None:
        """Seconds from `since_s` until there are `count` replicas; None: not within the limit."""
        while self.now() - since_s < limit_s:
            newest = self.seen[-1] if self.seen else None
            if newest is not None and newest.at_s >= since_s and newest.replicas == replicas:
                return newest.at_s - since_s
            await asyncio.sleep(WATCH_S / 2)
        return None

    async def close(self) -> None:
        """Look no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def process_id(place: str) -> int:
    """Of a replica, from where it says that it runs."""
    return int(place.rpartition("pid ")[2] or 0)
