"""One tenant's many requests, and how long another tenant's takes, by the clock of a pool's steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pool.local_pool import LocalPool
from tests.engine.harness import answer, call_of, random_prompts
from tests.engine.step_times import Clock
from turnout.calls import GenerateCall

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"model": "large"}),
    ("speculative", {"length": "fixed", "draft_length": 3}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}),
]


async def latency(pool: LocalPool, clock: Clock, call: GenerateCall) -> float:
    """Seconds by the clock until the last step for a call has ended."""
    started = clock.now
    await answer(pool, call)
    return max(now for now, feeds in clock.steps for feed in feeds if feed.table.seq.tenant == call.tenant) - started


def load(count: int, method: str, params: dict[str, Any], tenant: str, **options: Any) -> list[GenerateCall]:
    return [
        call_of(prompt, method, params, tenant=tenant, max_tokens=80, ignore_eos=True, seed=i, **options)
        for i, prompt in enumerate(random_prompts(count, 120, seed=3))
    ]


async def alone_and_beside(
    pool: LocalPool, clock: Clock, call: GenerateCall, crowd: list[GenerateCall], begun: Callable[[int], bool]
) -> tuple[float, float]:
    """A call's latency, and that of the same prompt of another tenant when a crowd has begun, most of which waits.

    Args:
        pool: on the clock.
        clock: of its steps.
        call: shares no prefix with the crowd.
        crowd: of yet another tenant; what is left of it is cancelled.
        begun: whether enough of the crowd runs, so many steps after it came.
    """
    alone = await latency(pool, clock, call)
    tasks = [asyncio.create_task(answer(pool, each)) for each in crowd]
    started = len(clock.steps)
    while not begun(len(clock.steps) - started):
        await asyncio.sleep(0)
    beside = await latency(pool, clock, replace(call, tenant="c"))
    answered = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert answered < len(crowd) / 2
    return alone, beside
