"""The actor of a job: a pool of models that answers block after block."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvloop

from deployments.access.callers import C, Caller
from deployments.batches.attempts import ALONE, GIVEN_UP, LOADING, LOADS, TOGETHER, AttemptLog
from deployments.batches.disk import named
from deployments.batches.job_directory import JobDirectory
from deployments.batches.journal import Journal
from deployments.batches.lines import Line, Result, answer_line, failed, not_asked, request_id_of, seed_of
from deployments.batches.retry import retried
from deployments.batches.spent import Spent
from deployments.local_backend import LocalBackend
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.request_fields import MAX_PROMPTS
from deployments.service import GenerationService
from deployments.telemetry.request_trace import UntracedRequests
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.gc_freeze import freeze_loaded
from turnout.throughput_config import throughput_settings

log = logging.getLogger(__name__)

HELD_S = 0.2  # between looks whether a block's other process has ended
PROCESS_ENDED = "process_ended"
MEMORY = "most likely there was not enough memory (see kv_memory_bytes of the models)"
# Seconds: models that are lost come back within minutes; a line may also be too long for the memory there is.
PASSING = {Code.UNAVAILABLE: 300.0, Code.RESOURCE_EXHAUSTED: 5.0}


@dataclass(frozen=True, slots=True)
class Task:
    """What an actor needs to know.

    Attributes:
        folder: the job's.
        config: the pool's configuration.
        pool: its name.
        seed: from which requests that name none get theirs.
        concurrency: requests that are answered at once.
        actors: processes that load the pool.
        num_processes: how many of them share a machine.
    """

    folder: Path
    config: TurnoutConfig
    pool: str
    seed: int
    concurrency: int
    actors: int = 1
    num_processes: int = 1

    @property
    def alone(self) -> TurnoutConfig:
        """The configuration of this one pool, for a process without a server."""
        pool = self.config.pools[self.pool]
        # `concurrency` lines are asked at once; each may hold many prompts, which are calls of their own.
        waiting = self.concurrency * MAX_PROMPTS
        places = {"max_ongoing_requests": self.concurrency, "max_queued_requests": waiting}
        return self.config.model_copy(
            update={
                "pools": {self.pool: pool.model_copy(update=places)},
                "engine": throughput_settings(self.config.engine, self.num_processes),
                "server": self.config.server.model_copy(update={"request_timeout_s": 86400.0}),
                "access": None,
                "batches": None,
                "responses": self.config.responses.model_copy(update={"keep": False}),
            }
        )


class Answerer:
    """Answers blocks, several at once, so that the engine's batch never runs dry.

    Args:
        task: what it works on.
        load: makes the pool; None: the real engine.
    """

    def __init__(self, task: Task, load: Callable[[str, TurnoutConfig], Any] | None = None) -> None:
        from deployments.pool_deployment import load_engine

        self._task = task
        self._place = JobDirectory(task.folder)
        self._job = self._place.job_id
        self._asked = self._place.asking(uuid4().hex)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="answers")
        self._thread.start()
        try:
            self._service = self._loaded(load or load_engine)
        except BaseException:
            self.close()
            raise
        self._room, self._turn = asyncio.Semaphore(task.concurrency), asyncio.Lock()

    def _loaded(self, load: Callable[[str, TurnoutConfig], Any]) -> GenerationService:
        loads = self._place.tries(LOADING)
        if loads.begun >= LOADS * self._task.actors:
            message = f"{loads.begun} processes ended while they loaded the models of pool {self._task.pool}: {MEMORY}"
            raise TurnoutError(Code.UNAVAILABLE, message)
        loads.begin()
        try:
            service: GenerationService = self._run(self._open(load))
        finally:
            loads.end()
        return service

    async def _open(self, load: Callable[[str, TurnoutConfig], Any]) -> GenerationService:
        task = self._task
        replica = PoolReplica(task.pool, task.alone, load)
        freeze_loaded()
        service = GenerationService(task.alone, {task.pool: LocalBackend(replica)}, Metrics())
        if task.config.telemetry.traces is None:  # what became of each line stands in the output
            service.tracer = UntracedRequests(service.metrics)
        return service

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the blocks that are named; Ray Data calls this from several threads.

        Raises:
            TurnoutError: UNAVAILABLE: the disk is full, or failed.
        """
        for block in batch["block"]:
            self._run(self.answer(str(block)))
        return batch

    def close(self) -> None:
        """Give up what is being asked and end the thread, where the process stays; an actor ends with its own."""
        self._run(_give_up())
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._asked.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def answer(self, block: str) -> None:
        """Answer what a block still lacks.

        Raises:
            TurnoutError: UNAVAILABLE: the disk is full, or failed; the models have been away for long; or whatever is
                asked ends its process.
        """
        with named(str(self._task.folder)):
            if self._place.is_done(block) or (begun := await self._begin(block)) is None:
                return
            started = time.perf_counter()
            with closing(begun) as journal:
                lines = await asyncio.to_thread(self._place.lines, block)
                spent = _so_far(journal)
                left = [line for line in lines if line.number not in journal]
                tries = self._place.tries(block)
                tries.begin()
                if tries.begun <= TOGETHER:
                    await self._together(left, journal, spent)
                else:
                    await self._one_by_one(block, left, journal, spent, tries)
                await asyncio.to_thread(journal.sync)
                spent.rows, spent.seconds = len(lines), time.perf_counter() - started
                await asyncio.to_thread(self._place.finish, block, spent)

    async def _together(self, lines: list[Line], journal: Journal, spent: Spent) -> None:
        asked = [asyncio.create_task(self._one(line, journal, spent, self._room)) for line in lines]
        try:
            await asyncio.gather(*asked)
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _one_by_one(
        self, block: str, lines: list[Line], journal: Journal, spent: Spent, tries: AttemptLog
    ) -> None:
        """Lines of a block whose processes ended, each alone: one that ends its process again fails, not the others."""
        failing = [line for line in lines if tries.alone[line.number] >= ALONE]
        if len(failing) >= GIVEN_UP and not any(number in journal for number in tries.alone):
            numbers = ", ".join(str(line.number) for line in failing[:GIVEN_UP])
            message = f"block {block}: processes ended at each of the lines {numbers}, asked alone: {MEMORY}"
            raise TurnoutError(Code.UNAVAILABLE, message)
        async with AsyncExitStack() as alone:
            await alone.enter_async_context(self._turn)  # two that wait for all the room would wait for ever
            for _ in range(self._task.concurrency):
                await alone.enter_async_context(self._room)
            # The shortest first: they tell whether it is the lines, or whatever is asked.
            for line in sorted(lines, key=lambda line: len(str(line.body))):
                if tries.alone[line.number] < ALONE:
                    tries.ask(line.number)
                    await self._one(line, journal, spent, nullcontext())
        for line in failing:
            message = f"line {line.number}: {ALONE} processes ended while they answered it and nothing else: {MEMORY}"
            result = not_asked(line, request_id_of(self._job, line.number), PROCESS_ENDED, message)
            self._keep(result, journal, spent)

    async def _begin(self, block: str) -> Journal | None:
        while True:
            try:
                return self._place.begin(block)
            except BlockingIOError:
                log.warning("block %s is still held by another process", block)
                await asyncio.sleep(HELD_S)

    async def _one(self, line: Line, journal: Journal, spent: Spent, room: AbstractAsyncContextManager[None]) -> None:
        request_id = request_id_of(self._job, line.number)
        noted = False

        async def ask() -> Result:
            nonlocal noted
            async with room:
                if not noted:
                    self._asked.write(f"{line.number}\n".encode())
                    noted = True
                return await answer_line(
                    self._service, line, request_id, self._attributed, seed_of(self._task.seed, line.number), Caller()
                )

        try:
            result = await retried(ask, PASSING)
        except TurnoutError as error:
            if error.code is Code.UNAVAILABLE:
                raise  # nothing is wrong with the line: it is asked when the job is run again
            result = failed(line, request_id, error)
        self._keep(result, journal, spent)

    def _keep(self, result: Result, journal: Journal, spent: Spent) -> None:
        journal.append(result)
        if result.spent is not None:
            spent.add(result.spent)

    def _attributed(self, call: C) -> C:
        return replace(call, batch_id=self._job)


async def _give_up() -> None:
    """End whatever else runs in this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _so_far(journal: Journal) -> Spent:
    """What the answers that a journal holds already used."""
    spent = Spent()
    for _, record in journal.entries(answered=True):
        spent.add(Spent.of_record(record))
    return spent
