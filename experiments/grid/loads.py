"""A cell under open-loop load: prompts leave when the schedule says, whether or not the pool keeps up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from experiments.grid.answering import call_of, fill, forget, scored
from experiments.grid.cells import Cell, Record
from experiments.grid.scoring import Item, Scorer
from experiments.load.clients import Refused
from experiments.load.generator import drive
from experiments.load.metrics import Objective, summarise
from experiments.load.records import LoadResult, Plan
from experiments.load.schedule import SCHEDULES
from pool.local_pool import LocalPool
from turnout.calls import Chunk, Usage
from turnout.errors import Code, TurnoutError

DRAIN_S = 120.0
GIVEN_UP = f"no whole answer {DRAIN_S:.0f} s after the last request"


class PoolClient:
    """Client of a pool in this process, in the order of the arrivals; a `LoadClient`.

    The load generator's own work is then part of what is measured: compare cells with each other, and use
    `make bench-load` for a server.
    """

    def __init__(self, pool: LocalPool, cell: Cell, items: Sequence[Item]) -> None:
        self._pool, self._cell, self._items = pool, cell, items
        self._sent = 0
        self.records: list[tuple[Item, Record]] = []

    async def answer(self, prompt: str, output: Callable[[], None]) -> int:
        """See `LoadClient.answer`; which prompt it is, is known from the order."""
        number, self._sent = self._sent, self._sent + 1
        item = self._items[number % len(self._items)]
        record = Record(f"{item.id}#{number}")
        try:
            async with aclosing(self._pool.generate(call_of(self._cell, item, number, self._pool.name))) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Chunk):
                        record.text += event.text
                        if event.tokens:
                            output()
                    elif isinstance(event, Usage):
                        fill(record, event, self._pool.roles["large"])
        except TurnoutError as error:
            record.error = f"{error.code.value}: {error.message}"
            raise Refused(error.code.value) from None
        finally:
            if not record.error and not record.tokens:
                record.error = f"{Code.DEADLINE_EXCEEDED.value}: {GIVEN_UP}"
            self.records.append((item, record))
        return record.tokens

    async def close(self) -> None:
        """See `LoadClient.close`."""


async def run_load(
    pool: LocalPool, cell: Cell, items: Sequence[Item], scorer: Scorer
) -> tuple[list[Record], dict[str, Any]]:
    """Carry the schedule out; answers in the order they came, and the figures of `experiments.load.metrics`."""
    load = cell.load
    assert load.rate is not None
    forget(pool)
    client = PoolClient(pool, cell, items)
    arrivals = SCHEDULES[load.schedule](load.rate, load.duration_s, cell.seed)
    prompts = tuple(item.prompt for item in items)
    timed = await drive(client, arrivals, prompts, DRAIN_S)
    plan = Plan(
        client="in process",
        address="",
        schedule=load.schedule,
        rate=load.rate,
        duration_s=load.duration_s,
        seed=cell.seed,
        prompts=(),
        model=cell.pool,
        max_tokens=cell.sampling.max_tokens,
    )
    summary = summarise(LoadResult(plan, tuple(timed), 0.0), Objective(load.ttft_s, load.tpot_s))
    records = [await scored(pool, cell, item, record, scorer) for item, record in client.records]
    return records, asdict(summary)
