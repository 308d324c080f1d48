"""Large files are read in a thread, line by line, and no line is held that is longer than may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from deployments.batches import job as job_module
from deployments.batches.reading import ReadAhead, numbered_lines, windows
from tests.batches.house import House, begin, content, ended, jsonl, line
from turnout.calls import GenerateCall


def test_a_long_line_is_cut_and_the_next_keeps_its_number(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n\n" + b"x" * (3 << 20) + b"\nend\n" + b"y" * 100)
    with path.open("rb") as file:
        found = list(numbered_lines(file, 10))
    assert found == [(1, b"a\n"), (3, b"x" * 11), (4, b"end\n"), (5, b"y" * 11)]


async def test_each_item_goes_to_one_taker_though_some_give_up() -> None:
    threads: set[int] = set()
    closed: list[bool] = []

    def items() -> Generator[int, None, None]:
        try:
            for number in range(500):
                threads.add(threading.get_ident())
                yield number
        finally:
            closed.append(True)

    ahead, found = ReadAhead(items()), list[int]()

    async def take() -> None:
        while (item := await ahead.next()) is not None:
            found.append(item)

    takers = [asyncio.create_task(take()) for _ in range(8)]
    await asyncio.sleep(0)
    takers[0].cancel()  # while it waits for what all wait for
    await asyncio.gather(*takers, return_exceptions=True)
    await ahead.close()
    assert takers[0].cancelled()
    assert sorted(found) == list(range(500))
    assert threading.get_ident() not in threads
    assert closed


async def test_what_reading_raises_comes_to_all_who_wait() -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise OSError("the disk")

    ahead = ReadAhead(broken())
    raised = await asyncio.gather(ahead.next(), ahead.next(), return_exceptions=True)
    await ahead.close()
    assert [str(each) for each in raised] == ["the disk", "the disk"]


async def test_no_line_of_a_file_is_read_on_the_loop_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    original = job_module.read_line

    def read_line(*given: object) -> object:
        threads.add(threading.get_ident())
        return original(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(job_module, "read_line", read_line)
    async with House(tmp_path, concurrency=8).open() as house:
        batch = await ended(house.client(), (await begin(house.client(), jsonl(line(str(n)) for n in range(60)))).id)
    assert batch.request_counts.completed == 60
    assert threads
    assert threading.get_ident() not in threads


def test_windows_end_after_so_many_lines_or_bytes() -> None:
    lines = [(number, b"x" * size) for number, size in enumerate([1, 1, 1, 9, 1, 20, 1])]
    found = [[number for number, _ in window] for window in windows(lines, 3, 10)]
    assert found == [[0, 1, 2], [3, 4], [5], [6]]


async def test_lines_that_begin_alike_are_asked_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    async with House(tmp_path, concurrency=1).open() as house:
        generate = house.pool.generate

        def noted(call: GenerateCall) -> Any:
            asked.append(str(call.prompt))
            return generate(call)

        monkeypatch.setattr(house.pool, "generate", noted)
        client = house.client()
        lines = [line(f"id-{n}", f"{'abc'[n % 3]} fast {n:02d}") for n in range(30)]
        batch = await ended(client, (await begin(client, jsonl(lines))).id)
        rows = await content(client, batch.output_file_id)
    assert asked == sorted(asked)
    assert len(asked) == 30
    assert [row["custom_id"] for row in rows] == [f"id-{n}" for n in range(30)]


async def test_every_line_that_is_no_request_is_in_the_error_file(tmp_path: Path) -> None:
    async with House(tmp_path, concurrency=8).open() as house:
        client = house.client()
        batch = await ended(client, (await begin(client, b"{no json\n" * 150)).id)
        assert batch.status == "failed"
        assert len(batch.errors.data) == 100
        errors = await content(client, batch.error_file_id)
        assert [each["error"]["line"] for each in errors] == list(range(1, 151))
