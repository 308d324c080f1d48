from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import fields, replace

import pytest

from deployments import coalesce as coalescing
from deployments.backend import merge
from deployments.coalesce import Coalescer, Pace
from turnout.calls import Chunk, Event, TokenOut
from turnout.message_size import units
from turnout.types import FinishReason, TokenKind


def chunk(text: str, index: int = 0, last: bool = False) -> Chunk:
    tokens = tuple(TokenOut(ord(letter), letter, "m", TokenKind.DECODED) for letter in text)
    return Chunk(index, text, tokens, FinishReason.STOP if last else None)


def coalesce(events: AsyncIterator[Event], gap_s: Callable[[], float]) -> Coalescer:
    async def fill(put: Callable[[Event], None]) -> None:
        async for event in events:
            put(event)

    return Coalescer(fill, gap_s)


class Source:
    """Hands out what the test puts in, and notes whether it was unwound."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        self.unwound = False

    async def events(self) -> AsyncIterator[Chunk]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.unwound = True

    def put(self, *items: Chunk | Exception | None) -> None:
        for item in items:
            self.queue.put_nowait(item)


async def test_first_item_leaves_at_once_and_later_ones_travel_together() -> None:
    source = Source()
    batches = coalesce(source.events(), lambda: 0.05)
    source.put(chunk("a"))
    assert await asyncio.wait_for(anext(batches), 30) == (chunk("a"),)
    source.put(chunk("b"), chunk("c"))
    assert await asyncio.wait_for(anext(batches), 30) == (chunk("bc"),)
    await batches.aclose()


async def test_the_end_is_not_held_back_by_the_gap() -> None:
    source = Source()
    batches = coalesce(source.events(), lambda: 3600.0)
    source.put(chunk("a"))
    await anext(batches)
    source.put(chunk("b"), chunk("c", last=True), None)
    assert await asyncio.wait_for(anext(batches), 30) == (chunk("bc", last=True),)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(batches), 30)


async def test_nothing_is_lost_or_reordered_for_a_slow_reader() -> None:
    async def letters() -> AsyncIterator[Chunk]:
        for letter in "abcdefghij":
            yield chunk(letter, index=ord(letter) % 2)
            await asyncio.sleep(0)

    texts = {0: "", 1: ""}
    async for batch in coalesce(letters(), lambda: 0.0):
        for part in batch:
            texts[part.index] += part.text
        await asyncio.sleep(0)
    assert texts == {1: "acegi", 0: "bdfhj"}


async def test_what_nobody_took_for_a_while_comes_in_parts_that_fit_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalescing, "PART_UNITS", units(6, 0))
    source = Source()
    batches = coalesce(source.events(), lambda: 3600.0)
    source.put(chunk("a"))
    texts = [(await anext(batches))[0]]
    source.put(*(chunk(2 * letter) for letter in "bcdefg"), chunk(9 * "x"), chunk("z", last=True), None)
    texts += [part async for batch in batches for part in batch]
    assert [part.text for part in texts] == ["a", "bbccdd", "eeffgg", 9 * "x", "z"], "one event stays whole"
    assert texts[-1].finish_reason is FinishReason.STOP


async def test_an_error_comes_after_what_was_written_before_it() -> None:
    source = Source()
    batches = coalesce(source.events(), lambda: 0.0)
    source.put(chunk("a"), ValueError("broken"))
    assert await anext(batches) == (chunk("a"),)
    with pytest.raises(ValueError, match="broken"):
        await anext(batches)


async def test_closing_unwinds_the_source_before_it_returns() -> None:
    source = Source()
    batches = coalesce(source.events(), lambda: 0.0)
    source.put(chunk("a"))
    await anext(batches)
    await batches.aclose()
    assert source.unwound


async def test_cancelling_the_reader_unwinds_the_source() -> None:
    source = Source()

    async def read() -> None:
        async for _ in coalesce(source.events(), lambda: 0.0):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert source.unwound


def test_merge_joins_each_choice_and_keeps_its_end() -> None:
    merged = merge([chunk("a", 1), chunk("b", 0), chunk("c", 1, last=True)])
    assert merged == (chunk("ac", 1, last=True), chunk("b", 0))


def test_the_pace_is_shared_between_streams_and_bounded() -> None:
    pace = Pace(items_per_second=100, longest_gap_s=0.1)
    pace.streams = 1
    assert not pace.gap_s, "one alone is not held back"
    pace.streams = 5
    assert pace.gap_s == pytest.approx(0.05)
    pace.streams = 64
    assert pace.gap_s == pytest.approx(0.1)


@pytest.mark.parametrize("sent", [chunk("ab"), chunk("", last=True), *chunk("a").tokens], ids=str)
def test_a_chunk_and_its_tokens_are_the_same_behind_a_hop(sent: Chunk | TokenOut) -> None:
    assert pickle.loads(pickle.dumps(sent)) == sent
    for field in fields(sent):  # whatever its type: none is left out
        changed = replace(sent, **{field.name: ("set",)})  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(changed)) == changed, field.name
