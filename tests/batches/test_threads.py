"""Threads that are waited for, whoever is cancelled."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from deployments.batches import job as job_module
from deployments.batches.job import finish_in_thread
from deployments.batches.journal import Journal


async def test_who_is_cancelled_is_so_when_the_thread_has_ended() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        assert go_on.wait(20)
        ended.append("written")

    async def wait() -> None:
        try:
            await finish_in_thread(work)
        finally:
            ended.append("closed")

    task = asyncio.create_task(wait())
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(3):  # also who is impatient
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["written", "closed"]


async def test_what_the_thread_says_is_passed_on() -> None:
    assert await finish_in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await finish_in_thread(divmod, 7, 0)


async def test_a_journal_that_is_opened_while_its_job_ends_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, go_on = threading.Event(), threading.Event()

    class SlowJournal(Journal):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            opened.set()
            assert go_on.wait(20)

    monkeypatch.setattr(job_module, "Journal", SlowJournal)
    task = asyncio.create_task(job_module._opened(tmp_path / "journal"))
    await asyncio.to_thread(opened.wait, 20)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    Journal(tmp_path / "journal").close()  # it would say that another one holds it
