"""Workers with stores of their own that keep asking, each in a thread, whatever happens to Redis meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore.redis.nodes import parse_url
from kvstore.redis.redis_store import RedisStore
from kvstore.types import Health
from tests.kvstore.prefixes import CHUNK, Engine, shared, tokens

CHUNKS = 4
BUDGET_S = 0.3
PACE_S = 0.01


@dataclass(frozen=True, slots=True)
class Record:
    """One request: when it was answered, how long the look-up took, with and without a store, and what it found."""

    at: float
    with_store: float
    without: float
    chunks: int
    health: Health


@dataclass
class Member:
    """One worker, as its thread sees it.

    Attributes:
        wrong: chunks that were found and are not what the prompt's would be.
        errors: anything else that a request met.
    """

    number: int
    records: list[Record] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    faults: Callable[[], dict[str, int]] = dict


class Fleet:
    """Workers at one address.

    Args:
        url: of Redis, or of what stands before it.
        count: of workers.
        cooldown_s: of their breakers.
    """

    def __init__(self, url: str, count: int, cooldown_s: float) -> None:
        self._url = url
        self._cooldown = cooldown_s
        self._stop = threading.Event()
        self.prompts: list[list[int]] = []
        self.members = [Member(number) for number in range(count)]
        self.ask_for(0)
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self.members]

    def ask_for(self, series: int) -> None:
        """From now on, ask for prompts that were not asked for before."""
        self.prompts = [tokens(CHUNKS * CHUNK + 1, seed=10 * series + each) for each in range(4)]

    def since(self, began: float) -> list[Record]:
        """Requests that began and ended after a time."""
        every = [record for member in self.members for record in list(member.records)]
        return [record for record in every if record.at - record.with_store >= began]

    def served_in_full(self, began: float) -> bool:
        """Whether every worker, at some time since then, found everything three times in a row from a store that is
        well.

        Not all of them at one moment: on a busy machine some worker is always late by its own fault.
        """
        return all(_in_a_row(member, began) >= 3 for member in self.members)

    def faults(self) -> dict[str, int]:
        """Of all workers, by kind."""
        found: dict[str, int] = {}
        for member in self.members:
            for kind, count in member.faults().items():
                found[kind] = found.get(kind, 0) + count
        return found

    def check(self) -> None:
        """Nothing wrong was found, and no request met an error."""
        for member in self.members:
            assert not member.wrong, f"worker {member.number}: {member.wrong[:3]}"
            assert not member.errors, f"worker {member.number}: {member.errors[:3]!r}"

    @contextmanager
    def at_work(self) -> Iterator[Fleet]:
        """For as long as the block lasts."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(30.0)
        assert not any(thread.is_alive() for thread in self._threads), "a request was never answered"

    def _run(self, member: Member) -> None:
        try:
            asyncio.run(self._serve(member))
        except Exception as error:
            member.errors.append(error)

    async def _serve(self, member: Member) -> None:
        store = RedisStore(parse_url(self._url), breaker_cooldown_s=self._cooldown)
        rng = random.Random(member.number)
        try:
            with shared(store, fetch_timeout_s=BUDGET_S) as stores, shared(None) as nothing:
                engine, bare = Engine(stores), Engine(nothing)
                member.faults = lambda: dict(engine.store.stats().faults)
                while not self._stop.is_set():
                    await _one(member, engine, bare, rng.choice(self.prompts))
                    await asyncio.sleep(PACE_S * rng.uniform(0.5, 1.5))
        finally:
            store.close()


def _in_a_row(member: Member, began: float) -> int:
    """The longest run of full answers since a time."""
    longest = run = 0
    for each in list(member.records):
        run = run + 1 if each.at > began and each.chunks == CHUNKS and each.health == "ok" else 0
        longest = max(longest, run)
    return longest


async def _one(member: Member, engine: Engine, bare: Engine, prompt: list[int]) -> None:
    began = time.monotonic()
    await bare.find(prompt)
    middle = time.monotonic()
    found: Any = None
    try:
        found = await engine.find(prompt)
    except AssertionError as wrong:
        member.wrong.append(str(wrong))
    except Exception as error:
        member.errors.append(error)
    end = time.monotonic()
    chunks = len(found.chunks) if found is not None else 0
    member.records.append(Record(end, end - middle, middle - began, chunks, engine.store.health()))
    engine.compute(prompt, chunks)
