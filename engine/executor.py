"""Running the forwards of one model on its device's thread: timed, never abandoned, faults kept to who caused them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import torch

from decoding.model import Readout
from engine.device import Device
from engine.runner import Feed, Runner

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

    async def run(self, feeds: Sequence[Feed], threads: int | None = None) -> tuple[list[list[Readout]], float]:
        """Rows of each feed, and the seconds of the forward. A cancellation is passed on when the forward has ended.

        Args:
            feeds: what it reads.
            threads: CPU threads it uses; None: as many as torch is set to.
        """
        running = self.device.run(lambda: self._timed(feeds, threads))
        try:
            rows, seconds = await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.gather(running, return_exceptions=True)
            raise
        self.seconds += seconds
        return rows, seconds

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

    def _timed(self, feeds: Sequence[Feed], threads: int | None) -> tuple[list[list[Readout]], float]:
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        started = time.perf_counter()
        return self.runner.run(feeds), time.perf_counter() - started
