"""The forwards' thread: results, errors, order, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from engine.worker_thread import WorkerThread


async def test_work_runs_in_order_on_one_thread_and_hands_over_results_and_errors() -> None:
    thread, ran = WorkerThread("work"), []

    def work(number: int) -> str:
        ran.append(number)
        if number == 2:
            raise ValueError("two")
        return threading.current_thread().name

    pending = [thread.run(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
    found = await asyncio.gather(*pending, return_exceptions=True)
    assert ran == [0, 1, 2, 3]
    assert [str(each) for each in found] == ["work", "work", "two", "work"]
    assert isinstance(found[2], ValueError)
    thread.close()


async def test_what_nobody_waits_for_any_more_is_done_all_the_same() -> None:
    thread, begin, done = WorkerThread("work"), threading.Event(), threading.Event()
    running = thread.run(lambda: (begin.wait(), done.set()))
    running.cancel()
    begin.set()
    assert await asyncio.to_thread(done.wait, 60)
    assert await thread.run(lambda: 3) == 3
    thread.close()


def test_another_thread_may_wait_for_its_work() -> None:
    thread = WorkerThread("work")
    assert thread.call(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    thread.close()
    thread.close()  # twice does no harm
    with pytest.raises(RuntimeError, match="closed"):
        thread.call(lambda: 6)


def test_close_waits_for_what_is_queued() -> None:
    thread, done = WorkerThread("work"), []
    begin = threading.Event()

    async def queue() -> None:
        thread.run(lambda: (begin.wait(), done.append(1)))

    asyncio.run(queue())  # this loop is closed when its work ends
    begin.set()
    thread.close()
    assert done == [1]


def test_a_forgotten_thread_ends() -> None:
    thread = WorkerThread("forgotten")
    assert thread.call(lambda: 1) == 1
    [running] = [each for each in threading.enumerate() if each.name == "forgotten"]
    del thread
    gc.collect()
    running.join(60)
    assert not running.is_alive()
