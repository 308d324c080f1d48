"""Runner of a server's batches: one process at a time, in the time that other requests leave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.batches.job import BatchJob
from deployments.batches.records import BatchRecord, progress_of
from deployments.batches.store import BatchStore
from deployments.metrics import BATCH_STATES
from deployments.service import GenerationService
from turnout.errors import TurnoutError

POLL_S = 0.25
SWEEP_S = 600.0
AT_ONCE = 4  # batches of one tenant; each holds files open
AGAIN_S = 5.0  # after a batch that could not go on, as where the disk is full

log = logging.getLogger("ray.serve")


class BatchRunner:
    """Runner of batches that have not ended, whichever process accepted them: the oldest of each tenant at once.

    Args:
        store: where they are.
        service: whom to ask.
    """

    def __init__(self, store: BatchStore, service: GenerationService) -> None:
        self._store = store
        self._service = service
        self._room = asyncio.Semaphore(store.config.concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, BatchJob] = {}
        self._left: set[str] = set()  # batches that were left off since their records were last looked at

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work on batches for as long as the context lasts; what is under way is kept, and gone on with later."""
        task = asyncio.create_task(self._run(), name="batches")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                with self._store.turn() as mine:
                    if mine:
                        await self._work()
            except TurnoutError as error:
                log.error("batches: %s", error)
            except Exception:  # nothing else would start this again: after any error, batches go on after a moment
                log.exception("batches")
            await asyncio.sleep(POLL_S)

    async def _work(self) -> None:
        swept = -SWEEP_S
        try:
            while True:
                self._left.clear()
                unfinished, due = await asyncio.to_thread(self._look)
                self._tell(unfinished)
                for record in due:
                    # One that was left off meanwhile has another record by now: it may have ended.
                    if record.id not in self._tasks and record.id not in self._left:
                        job = self._jobs[record.id] = BatchJob(record, self._store, self._service, self._room)
                        self._tasks[record.id] = asyncio.create_task(self._see_through(job), name=record.id)
                if time.monotonic() >= swept + SWEEP_S:
                    swept = time.monotonic()
                    await asyncio.to_thread(self._store.sweep, time.time())
                await asyncio.sleep(POLL_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tell([])

    def _tell(self, unfinished: list[BatchRecord]) -> None:
        """Show how far batches are."""
        lines = Counter[str](dict.fromkeys(BATCH_STATES, 0))
        for record in unfinished:
            job = self._jobs.get(record.id)
            lines.update(job.progress if job is not None else progress_of(record))
        self._service.metrics.batch_lines(lines)

    def _look(self) -> tuple[list[BatchRecord], list[BatchRecord]]:
        """Batches that have not ended, and those of them that are worked on.

        These are the oldest of each tenant, and those of which only the end is left. Those that have been begun go
        first: batches of one second are in no order that lasts when others come.
        """
        unfinished = list(self._store.unfinished())
        found, places = list[BatchRecord](), Counter[str]()
        for record in sorted(unfinished, key=lambda each: each.id not in self._tasks):
            places[record.tenant] += 1
            over = time.time() >= record.expires_at or self._store.is_cancelled(record)
            if places[record.tenant] <= AT_ONCE or over:
                found.append(record)
        return unfinished, found

    async def _see_through(self, job: BatchJob) -> None:
        """Work on one batch; where that fails it is taken up again a little later, from what was kept."""
        name = job.record.id
        try:
            await job.run()
        except TurnoutError as error:
            log.error("%s stands still: %s", name, error)
            await asyncio.sleep(AGAIN_S)
        except Exception:
            log.exception("%s stands still", name)
            await asyncio.sleep(AGAIN_S)
        finally:
            del self._tasks[name], self._jobs[name]
            self._left.add(name)
