"""Utilisation of the machine while answers are computed: memory sampled from the side, processor time, its idle state.

The figures of EfficientLLM (paper #232) are worked out from it in `experiments.reports.efficiency`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from engine.costs.machine import measure_machine, memory_bytes
from experiments.grid.cells import Utilisation
from experiments.grid.energy import EnergyMeter
from experiments.process_cpu import busy_seconds
from experiments.process_memory import resident_bytes
from pool.local_pool import LocalPool

PERIOD_S = 0.05
IDLE_S = 0.5


@dataclass(slots=True)
class Signal:
    """A figure that is looked at now and then: between two looks it is taken for a straight line.

    Attributes:
        area: its integral over time.
        seconds: from the first look to the last.
        most: largest value seen.
        count: looks.
    """

    area: float = 0.0
    seconds: float = 0.0
    most: float = 0.0
    count: int = 0
    _last: tuple[float, float] = (0.0, 0.0)

    def add(self, at: float, value: float) -> None:
        """Note a look.

        Args:
            at: seconds, not before the last one.
            value: seen then.
        """
        before, was = self._last
        if self.count:
            self.area += (at - before) * (value + was) / 2
            self.seconds += at - before
        self._last = (at, value)
        self.most = max(self.most, value)
        self.count += 1


@dataclass(frozen=True, slots=True)
class Sensors:
    """Sensors of a pool's machine.

    Attributes:
        memory: bytes in use: of the device that the large model is on, or of this process where that is a processor.
        machine: what stays the same while it is watched; its sums are zero.
    """

    memory: Callable[[], float]
    machine: Utilisation


def open_sensors(pool: LocalPool, device: torch.device) -> Sensors:
    """Watch the machine idle, and measure its peak: about a second in which nothing else may be asked of the pool.

    Args:
        pool: with its models loaded and warm.
        device: of the large model.
    """
    memory = memory_in_use(device)
    large = pool.engines[pool.roles["large"]]
    meter = EnergyMeter.start()
    with watched(memory) as idle:
        time.sleep(IDLE_S)
    joules = meter.joules()
    machine = Utilisation(
        period_s=PERIOD_S,
        memory_total_bytes=memory_bytes(device),
        cores=len(os.sched_getaffinity(0)),
        weight_bytes={name: model.num_parameters * model.dtype.itemsize for name, model in pool.engines.items()},
        idle_s=idle.sampled_s,
        idle_memory_bytes=round(idle.memory_byte_s / idle.sampled_s),
        idle_cores=idle.machine_cpu_s / idle.sampled_s,
        idle_watts=None if joules is None else joules / idle.sampled_s,
        peak_flops_per_s=peak_flops_per_s(large.dtype, device),
    )
    return Sensors(memory, machine)


def memory_in_use(device: torch.device) -> Callable[[], float]:
    """A function that tells the bytes in use on a device: of all its users, or of this process on a processor."""
    if device.type != "cuda":
        return resident_bytes

    def used() -> float:
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)

    return used


@cache
def peak_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Of matrix products, in the model's format or in float32, whichever is faster: not all processors have both."""
    return max(measure_machine(each, device).flops_per_s for each in {dtype, torch.float32})


@contextmanager
def watched(memory: Callable[[], float], period_s: float = PERIOD_S) -> Iterator[Utilisation]:
    """Watch the machine from a thread of its own.

    Args:
        memory: bytes in use.
        period_s: between two looks; there is one at each end besides.

    Yields:
        The figures, which are there when the block has ended.
    """
    found, signal, over = Utilisation(period_s=period_s), Signal(), threading.Event()

    def look() -> None:
        signal.add(time.perf_counter(), memory())

    def watch() -> None:
        while not over.wait(period_s):
            look()

    watcher = threading.Thread(target=watch, name="utilisation", daemon=True)
    own, everyone = time.process_time(), busy_seconds()
    look()
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        look()
        found.cpu_s, found.machine_cpu_s = time.process_time() - own, busy_seconds() - everyone
        found.sampled_s, found.samples = signal.seconds, signal.count
        found.memory_byte_s, found.memory_peak_bytes = signal.area, round(signal.most)
