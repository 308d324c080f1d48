"""How a batch ends, once: in time or late, with a full disk, and whatever is read of it meanwhile."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from decoding.structures import Compiler, check_whole
from deployments.batches import journal as journal_module
from deployments.batches.records import BatchRecord
from deployments.batches.runner import BatchRunner
from deployments.batches.store import BatchStore
from tests.batches.house import House, begin, content, ended, jsonl, line
from tests.constrained import char_vocabulary
from turnout.calls import GenerateCall, Usage
from turnout.structure import Structure


@pytest.mark.parametrize("full", [False, True])
async def test_a_batch_that_takes_too_long_expires_and_names_what_was_not_answered(
    house: House, tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = house.client()
    batch = await begin(client, jsonl([line("quick"), line("never", "wait")]), completion_window="1m")
    store = BatchStore(house.service.batches)  # type: ignore[arg-type]
    while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
        await asyncio.sleep(0.02)
    [record] = store.unfinished()
    # As if the minute had passed while the server was down.
    await restart(house, lambda: store.save_batch(record.model_copy(update={"expires_at": int(time.time())})))
    if full:
        monkeypatch.setattr("deployments.batches.runner.AGAIN_S", 0.05)
        fill_disk_once(monkeypatch)
    async with House(tmp_path, concurrency=8).open() as again:
        client = again.client()
        batch = await ended(client, batch.id)
        assert batch.status == "expired"
        assert [row["custom_id"] for row in await content(client, batch.output_file_id)] == ["quick"]
        [late] = await content(client, batch.error_file_id)
        assert (late["custom_id"], late["error"]["code"]) == ("never", "batch_expired")


async def restart(house: House, meanwhile: Any) -> None:
    """End what works on batches in a house, as the end of its process would."""
    [task] = [each for each in asyncio.all_tasks() if each.get_name() == "batches"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    meanwhile()


def fill_disk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for a batch's first file; what was named as late before that is kept."""
    real, tries = journal_module.Journal.export, itertools.count()

    def export(self: journal_module.Journal, path: Path, answered: bool) -> int:
        if not next(tries):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, path, answered)

    monkeypatch.setattr(journal_module.Journal, "export", export)


async def test_a_batch_that_ends_while_records_are_read_is_not_begun_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, go_on, late = asyncio.get_running_loop(), asyncio.Event(), list[str]()
    look, save, generate, saved = BatchRunner._look, BatchStore.save_batch, house.pool.generate, list[str]()

    async def held(call: GenerateCall) -> AsyncIterator[Any]:
        await go_on.wait()
        async for event in generate(call):
            yield event

    def slow(self: BatchRunner) -> Any:
        """Comes back with what it has read once that batch has ended."""
        found = look(self)
        if any(record.id in self._tasks for record in found[1]):
            loop.call_soon_threadsafe(go_on.set)
            while self._tasks:
                time.sleep(0.01)
            late.append("read before, told after")
        else:
            late.append("read")
        return found

    def keep(self: BatchStore, record: BatchRecord) -> None:
        saved.append(record.status)
        save(self, record)

    monkeypatch.setattr(house.pool, "generate", held)
    monkeypatch.setattr(BatchRunner, "_look", slow)
    monkeypatch.setattr(BatchStore, "save_batch", keep)
    client = house.client()
    batch = await begin(client, jsonl([line("a")]))
    async with asyncio.timeout(60):
        while "read before, told after" not in late or late[-2:] != ["read", "read"]:
            await asyncio.sleep(0.02)
    assert (await client.batches.retrieve(batch.id)).status == "completed"
    assert saved.count("completed") == 1
    assert saved[-1] == "completed"


async def test_a_line_whose_grammar_cannot_be_followed_is_not_asked_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Compiler(char_vocabulary("ab")).compile(Structure(kind="regex", value="aZ|bb")).clone()
    generate, asked = house.pool.generate, list[str]()

    async def ends_stuck(call: GenerateCall) -> AsyncIterator[Any]:
        asked.append(str(call.prompt))
        async for event in generate(call):
            if call.prompt == "stuck" and isinstance(event, Usage):
                check_whole(stuck, [2])
            yield event

    monkeypatch.setattr(house.pool, "generate", ends_stuck)
    client = house.client()
    batch = await ended(client, (await begin(client, jsonl([line("a"), line("b", "stuck")]))).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    [error] = await content(client, batch.error_file_id)
    assert "could not be followed" in error["response"]["body"]["error"]["message"]
    assert sorted(asked) == ["short", "stuck"]


async def test_a_full_disk_stops_a_batch_until_there_is_room(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.batches.runner.AGAIN_S", 0.1)
    real, full, failures = os.pwrite, True, 0

    def pwrite(handle: int, data: bytes, place: int) -> int:
        nonlocal failures
        failures += full
        if not full:
            return real(handle, data, place)
        real(handle, data[:10], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_module.os, "pwrite", pwrite)
    client = house.client()
    batch = await begin(client, jsonl(line(f"id-{n}") for n in range(20)))
    while failures < 3:
        await asyncio.sleep(0.02)
    before = await client.batches.retrieve(batch.id)
    assert (before.status, before.request_counts.completed) == ("in_progress", 0)
    full = False
    batch = await ended(client, batch.id)
    rows = await content(client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"id-{n}" for n in range(20)]


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), RuntimeError("whatever it is")])
async def test_a_folder_that_cannot_be_looked_through_once_stops_no_batch(
    house: House, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    glob, tries = Path.glob, itertools.count()

    def failing(path: Path, pattern: str) -> Any:
        if pattern == "*/batches/*.json" and not next(tries):
            raise fault
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", failing)
    client = house.client()
    batch = await begin(client, jsonl([line("a")]))
    assert (await ended(client, batch.id)).status == "completed"
    assert next(tries) > 1
