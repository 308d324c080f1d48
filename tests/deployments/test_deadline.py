"""One clock for a whole stream: it runs while the server is waited for, and never while the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.backend import Batch
from deployments.deadline import Deadline
from turnout.calls import Begun
from turnout.errors import Code, TurnoutError

BATCH: Batch = (Begun(1),)


async def passed(seconds: float) -> None:
    """Returns when so much time has passed, by the loop's clock."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()


def cancellations() -> int:
    """How often the test itself has been cancelled."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def read(parts: AsyncGenerator[Batch, None], into: list[Batch]) -> None:
    while (batch := await anext(parts, None)) is not None:
        into.append(batch)


async def batches(*pauses_s: float) -> AsyncGenerator[Batch, None]:
    for pause_s in pauses_s:
        if pause_s:
            await passed(pause_s)
        yield BATCH


async def test_a_batch_that_comes_too_late_ends_the_stream() -> None:
    got: list[Batch] = []
    with pytest.raises(TurnoutError) as refusal:
        await read(Deadline(1.5).over(batches(0.0, 0.01, 30.0)), got)
    assert (len(got), refusal.value.code, refusal.value.field) == (2, Code.DEADLINE_EXCEEDED, "deadline_s")
    assert cancellations() == 0


async def test_a_client_may_read_as_slowly_as_it_likes_what_is_there() -> None:
    async with aclosing(Deadline(0.02).over(batches(0.0, 0.0, 0.0))) as parts:
        got = 0
        async for _ in parts:
            got += 1
            await passed(0.03)
    assert got == 3


async def test_what_is_not_there_is_not_waited_for_after_the_deadline() -> None:
    parts = Deadline(0.02).over(batches(0.0, 30.0))
    await anext(parts)
    await passed(0.04)
    with pytest.raises(TurnoutError, match=r"longer than 0\.02 s"):
        await asyncio.wait_for(anext(parts), 5)


async def test_who_cancels_is_not_told_of_a_deadline() -> None:
    task = asyncio.create_task(read(Deadline(30.0).over(batches(30.0)), []))
    await passed(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_a_deadline_there_is_no_timer() -> None:
    assert [batch async for batch in Deadline(None).over(batches(0.0, 0.01))] == [BATCH, BATCH]


async def test_the_timer_goes_with_its_stream() -> None:
    async with aclosing(Deadline(0.02).over(batches(0.0, 0.0))) as parts:
        await anext(parts)
    await passed(0.04)
    assert cancellations() == 0
