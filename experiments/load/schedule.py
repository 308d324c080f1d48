"""When requests arrive: Poisson, constant and bursty schedules, fixed before the run by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

BURST = 8  # requests of one burst, all at once


def poisson(rate: float, duration_s: float, seed: int) -> list[float]:
    """Independent arrivals, `rate` a second on average: what many users who do not know of each other send.

    Returns:
        Times in seconds from the start, ascending, below `duration_s`.
    """
    return _poisson(random.Random(seed), rate, duration_s)


def constant(rate: float, duration_s: float, seed: int) -> list[float]:
    """Evenly spaced arrivals; the seed changes nothing."""
    del seed
    return [number / rate for number in range(round(rate * duration_s))]


def bursts(rate: float, duration_s: float, seed: int) -> list[float]:
    """Bursts of eight at Poisson times, with the same mean rate of requests."""
    starts = _poisson(random.Random(seed), rate / BURST, duration_s)
    return [start for start in starts for _ in range(BURST)]


def at_once(rate: float, duration_s: float, seed: int) -> list[float]:
    """Everything at the start: how long the server takes for it is its capacity."""
    del seed
    return [0.0] * round(rate * duration_s)


Schedule = Callable[[float, float, int], list[float]]
SCHEDULES: dict[str, Schedule] = {"poisson": poisson, "constant": constant, "bursts": bursts, "at once": at_once}


def _poisson(source: random.Random, rate: float, duration_s: float) -> list[float]:
    times: list[float] = []
    time_s = source.expovariate(rate)
    while time_s < duration_s:
        times.append(time_s)
        time_s += source.expovariate(rate)
    return times
