"""Sends requests on schedule and times them: `python -m experiments.load.generator`, a Plan in, a LoadResult out.

It runs as a process of its own, so that neither the server nor the benchmark shares its event loop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import uvloop

from experiments.load.clients import CLIENTS, LoadClient, Refused
from experiments.load.records import LoadResult, Plan, Record
from experiments.load.schedule import SCHEDULES

UNFINISHED = "UNFINISHED"


async def drive(
    client: LoadClient,
    arrivals: Iterable[float],
    prompts: Sequence[str],
    drain_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Record]:
    """Send one request at each arrival time, never waiting for an answer, and read all answers.

    Latencies count from the scheduled time, so that a server, or a client, that falls behind is seen to
    (coordinated omission).

    Args:
        client: how to ask.
        arrivals: seconds from the start, ascending.
        prompts: taken in turn.
        drain_s: seconds after the last arrival until what is unfinished is given up.
        clock: seconds; not the loop's own, which uvloop rounds to milliseconds.
    """
    start = clock()

    def now() -> float:
        return clock() - start

    tasks: list[asyncio.Task[Record]] = []
    for number, arrival in enumerate(arrivals):
        while (wait := arrival - now()) > 0:  # noqa: ASYNC110 (a timer may fire a millisecond early)
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_one(client, prompts[number % len(prompts)], arrival, now)))
    if tasks:
        _, unfinished = await asyncio.wait(tasks, timeout=drain_s)
        for task in unfinished:
            task.cancel()
    return list(await asyncio.gather(*tasks))


async def _one(client: LoadClient, prompt: str, arrival: float, now: Callable[[], float]) -> Record:
    sent = now()
    times: list[float] = []

    def output() -> None:
        times[1:] = [now()]

    try:
        tokens = await client.answer(prompt, output)
    except Refused as refusal:
        return Record(arrival, sent, error=refusal.code)
    except asyncio.CancelledError:
        return Record(arrival, sent, error=UNFINISHED)
    if not times:
        return Record(arrival, sent, error="NO_OUTPUT")
    return Record(arrival, sent, times[0], times[-1], tokens)


async def run(plan: Plan) -> LoadResult:
    """Carry out a plan and watch this process's own CPU time."""
    client = CLIENTS[plan.client](plan)
    arrivals = SCHEDULES[plan.schedule](plan.rate, plan.duration_s, plan.seed)
    watch = CpuWatch()
    sending = asyncio.create_task(watch.after(plan.duration_s))
    try:
        records = await drive(client, arrivals, plan.prompts, plan.drain_s)
    finally:
        await client.close()
    # Waiting for the last answers is cheap and would hide what sending cost.
    cores = max(watch.cores(), sending.result()) if sending.done() else watch.cores()
    sending.cancel()
    return LoadResult(plan, tuple(records), cores)


class CpuWatch:
    """Cores this process, all its threads included, has used since the watch was made."""

    def __init__(self) -> None:
        self._used, self._started = _cpu_seconds(), time.monotonic()

    def cores(self) -> float:
        """CPU seconds per second so far."""
        return (_cpu_seconds() - self._used) / (time.monotonic() - self._started)

    async def after(self, seconds: float) -> float:
        """`cores`, a while from now."""
        await asyncio.sleep(seconds)
        return self.cores()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Read the plan from stdin, write the result to stdout."""
    values = json.load(sys.stdin)
    plan = Plan(**{**values, "prompts": tuple(values["prompts"])})
    gc.freeze()
    result = uvloop.run(run(plan))
    json.dump(result.as_dict(), sys.stdout)


if __name__ == "__main__":
    main()
