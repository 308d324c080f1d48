"""Iterators that run side by side, and iterators with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar

from turnout.errors import Code, TurnoutError

T = TypeVar("T")


async def together(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Items of several iterators as they come, each with the number of its source.

    The first that fails ends all; leaving the iteration early closes all.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as items:  # type: ignore[type-var]
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def drain(place: int, source: AsyncIterator[T]) -> None:
        try:
            async with aclosing(source) as items:  # type: ignore[type-var]
                async for item in items:
                    queue.put_nowait((place, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        except asyncio.CancelledError as error:  # of this source alone: it would be waited for
            queue.put_nowait(error)
            raise

    tasks = [asyncio.create_task(drain(*each)) for each in enumerate(sources)]
    left = len(tasks)
    try:
        while left:
            found = await queue.get()
            if found is None:
                left -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(deadline: float | None, deadline_s: float | None, source: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items, until a time of the event loop's clock.

    Args:
        deadline: the time; None: none.
        deadline_s: what the caller asked for, for the message.
        source: is closed at the deadline, and when the iteration is left.

    Raises:
        TurnoutError: DEADLINE_EXCEEDED.
    """
    async with aclosing(source) as items:  # type: ignore[type-var]
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError:
                message = f"deadline_s: {deadline_s or 0.0:g} s have passed"
                raise TurnoutError(Code.DEADLINE_EXCEEDED, message, "deadline_s") from None
            yield item
