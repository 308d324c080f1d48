"""Running the forwards of one model on its device's thread: timed, never abandoned, faults kept to who caused them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from decoding.model import Readout
from engine.device import Device
from engine.runner import Feed, Runner
from engine.scheduler.token_run import TokenRun

T = TypeVar("T")
Outcome = list[Readout] | Exception


class Forwards:
    """Runs forwards and keeps account of their time.

    Args:
        runner: executes them.
        device: where; the caller holds its turn.

    Attributes:
        seconds: time spent in forwards so far.
    """

    def __init__(self, runner: Runner, device: Device) -> None:
        self.runner = runner
        self.device = device
        self.seconds = 0.0

    async def run(self, feeds: Sequence[Feed], threads: int | None = None) -> tuple[Sequence[list[Readout]], float]:
        """Rows of each feed, and the seconds of the forward. A cancellation is passed on when the forward has ended.

        Args:
            feeds: what it reads.
            threads: CPU threads it uses; None: as many as torch is set to.
        """
        rows, seconds = await _ended(self.device.run(lambda: self._timed(feeds, threads)))
        self.seconds += seconds
        return rows, seconds

    async def follow(self, run: TokenRun, take: Callable[[], object], threads: int | None = None) -> None:
        """Let a run go on until it ends. A cancellation ends it, and is passed on when its forward has ended.

        Args:
            run: of the present step.
            take: called on the event loop when rows are to be handed out meanwhile.
            threads: CPU threads that its forwards use; None: as many as torch is set to.
        """
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(take)

        def forwards() -> None:
            _use(threads)
            run.forwards(self.runner, self.device.has_changed, wake)

        try:
            await _ended(self.device.run(forwards), run.stop)
        finally:
            self.seconds += sum(run.seconds)

    async def run_each(self, feeds: Sequence[Feed]) -> list[Outcome]:
        """One forward for each feed: its rows, or the error of that forward."""
        outcomes: list[Outcome] = []
        for feed in feeds:
            try:
                [rows], _ = await self.run([feed])
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(rows)
        return outcomes

    def _timed(self, feeds: Sequence[Feed], threads: int | None) -> tuple[Sequence[list[Readout]], float]:
        _use(threads)
        started = time.perf_counter()
        return self.runner.run(feeds), time.perf_counter() - started


def _use(threads: int | None) -> None:
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


async def _ended(running: asyncio.Future[T], stop: Callable[[], object] | None = None) -> T:
    """What work on the thread comes to; where the caller is cancelled, `stop` is called and the work's end awaited."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.gather(running, return_exceptions=True)
        raise
