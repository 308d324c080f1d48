"""Lines that end the process that answers them, and models that end the process that loads them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.batches import answerer, offline
from deployments.batches.answerer import PROCESS_ENDED, Answerer, Task
from deployments.batches.attempts import ALONE, GIVEN_UP, LOADING, LOADS, TOGETHER
from deployments.batches.inputs import Defaults
from deployments.batches.job_directory import JobDirectory
from deployments.batches.lines import Line
from deployments.batches.offline import Job, Progress, run
from tests.batches.house import batch_config, jsonl, line, read
from tests.batches.test_workplace import outputs
from tests.deployments.fake_pool import FakePool, load_fake_pool
from turnout.calls import Event, GenerateCall
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError


def place_of(folder: Path, prompts: list[str], block_rows: int = 100) -> JobDirectory:
    place = JobDirectory(folder / "work")
    place.open({"input": "in"}, fresh=False)
    rows = [
        Line(number, f"id-{number}", "/v1/completions", {"prompt": prompt, "max_tokens": 2})
        for number, prompt in enumerate(prompts, 1)
    ]
    place.stage(rows, block_rows, None)
    return place


class Ending:
    """A process that answers a job's one block, and ends once a line says `end`: what runs in it is given up.

    Attributes:
        beside: of each line that was begun in it, how many others were under way.
    """

    def __init__(self, folder: Path, concurrency: int = 4) -> None:
        self.beside: dict[str, int] = {}
        self._running = 0
        self._made = Answerer(Task(folder / "work", batch_config(folder), "demo", 0, concurrency), load_fake_pool)
        self._pool = self._made._service._backends["demo"]._answers._pool  # type: ignore[attr-defined]
        self._generate, self._pool.generate = self._pool.generate, self.generate
        self._work: asyncio.Task[None] | None = None

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        text = str(call.prompt)
        self.beside[text] = self._running
        self._running += 1
        try:
            if "end" in text:
                assert self._work is not None
                self._work.cancel()
            async for event in self._generate(call):
                yield event
        finally:
            self._running -= 1

    def runs_through(self, block: str) -> bool:
        """Whether it answered the block; else it has ended before."""

        async def work() -> bool:
            self._work = asyncio.create_task(self._made.answer(block))
            await asyncio.gather(self._work, return_exceptions=True)
            if not self._work.cancelled():
                self._work.result()
            return not self._work.cancelled()

        through: bool = self._made._run(work())
        return through


def test_a_line_that_ends_its_process_each_time_fails_and_no_other_does(tmp_path: Path) -> None:
    place = place_of(tmp_path, ["fast", "slow and long", "z end", "slow", "fast too", "slow 2"])
    [block] = place.blocks()
    processes = [Ending(tmp_path)]
    while not processes[-1].runs_through(block):
        assert place.most_begun() == len(processes) < 20
        processes.append(Ending(tmp_path))
    assert len(processes) == TOGETHER + ALONE + 1
    assert processes[0].beside["z end"] > 0
    for process in processes[TOGETHER:]:
        assert set(process.beside.values()) <= {0}
    good, bad = outputs(tmp_path, place)
    assert [row["custom_id"] for row in good] == ["id-1", "id-2", "id-4", "id-5", "id-6"]
    [lost] = bad
    assert (lost["custom_id"], lost["error"]["code"], lost["error"]["line"]) == ("id-3", PROCESS_ENDED, 3)
    assert "2 processes ended while they answered it and nothing else" in lost["error"]["message"]
    assert place.most_begun() == 0


def test_two_blocks_of_one_process_wait_for_each_other_where_lines_are_asked_alone(tmp_path: Path) -> None:
    place = place_of(tmp_path, [f"slow {number}" for number in range(6)], block_rows=2)
    first, *others = place.blocks()
    for block in others:
        for _ in range(TOGETHER):
            place.tries(block).begin()
    process = Ending(tmp_path, concurrency=3)

    async def all_of_them() -> None:
        async with asyncio.timeout(30):
            work = asyncio.create_task(process._made.answer(first))
            while len(process.beside) < 2:
                await asyncio.sleep(0.005)
            await asyncio.gather(work, *map(process._made.answer, others))

    process._made._run(all_of_them())
    assert [process.beside[f"slow {number}"] for number in range(2, 6)] == [0] * 4
    assert [len(list(place.records(answered))) for answered in (True, False)] == [6, 0]


def test_where_whatever_is_asked_ends_the_process_the_job_stops_and_no_line_is_lost(tmp_path: Path) -> None:
    place = place_of(tmp_path, [f"end {number}" for number in range(GIVEN_UP + 2)])
    [block] = place.blocks()
    ended: list[str] = []

    def go_on() -> None:
        while not Ending(tmp_path).runs_through(block):
            ended.append(block)

    with pytest.raises(TurnoutError, match="processes ended at each of the lines 1, 2, 3") as stopped:
        go_on()
    assert stopped.value.code is Code.UNAVAILABLE
    assert len(ended) == TOGETHER + ALONE * GIVEN_UP
    assert place.partly() == 0
    place.forget_tries()  # somebody has seen it, and runs it again
    assert not Ending(tmp_path).runs_through(block)
    assert place.tries(block).begun == 1


def test_models_that_end_each_process_that_loads_them_stop_the_job(tmp_path: Path) -> None:
    place = place_of(tmp_path, ["fast"])
    task = Task(place.folder, batch_config(tmp_path), "demo", 0, 4, actors=2)
    for _ in range(2 * LOADS - 1):
        place.tries(LOADING).begin()
    Answerer(task, load_fake_pool)
    assert place.tries(LOADING).begun == 0
    for _ in range(2 * LOADS):
        place.tries(LOADING).begin()
    with pytest.raises(TurnoutError, match="8 processes ended while they loaded the models of pool demo"):
        Answerer(task, load_fake_pool)


def test_a_refusal_to_load_is_no_end_of_a_process(tmp_path: Path) -> None:
    place = place_of(tmp_path, ["fast"])

    def refuse(name: str, config: TurnoutConfig) -> FakePool:
        raise TurnoutError(Code.INVALID_ARGUMENT, "the weights are no weights")

    for _ in range(LOADS + 1):
        with pytest.raises(TurnoutError, match="are no weights"):
            Answerer(Task(place.folder, batch_config(tmp_path), "demo", 0, 4), refuse)


def be_quick() -> None:
    """Let a line end one process with others and one alone, and models two: an actor takes its time to come back."""
    answerer.TOGETHER = answerer.ALONE = 1
    answerer.LOADS = 2


class Dying(Answerer):
    """As actors run it, but on a scripted pool, in which `die` ends the process."""

    def __init__(self, task: Task) -> None:
        be_quick()
        super().__init__(task, load_fake_pool)


def end_process(name: str, config: TurnoutConfig) -> FakePool:
    os._exit(1)


class Unloadable(Answerer):
    """As actors run it, on models that end each process that loads them."""

    def __init__(self, task: Task) -> None:
        be_quick()
        super().__init__(task, end_process)


def job_of(folder: Path, monkeypatch: pytest.MonkeyPatch, made: type[Answerer]) -> Job:
    """A job of two blocks whose actors are of that kind, and whose eighth line ends a process that can be ended so."""
    lines = [line(f"id-{number}", "die" if number == 7 else "fast", max_tokens=6) for number in range(20)]
    (folder / "in.jsonl").write_bytes(jsonl(lines))
    monkeypatch.setattr(offline, "Answerer", made)
    monkeypatch.setattr(Job, "described", lambda _: {"input": "in"})  # there are no weights to tell apart
    places = str(folder / "in.jsonl"), str(folder / "out.jsonl"), str(folder / "err.jsonl"), folder / "work"
    return Job(*places, batch_config(folder), "demo", Defaults(), block_rows=10)


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Data sets its own old settings
def test_a_job_whose_actor_is_killed_at_each_try_ends_with_that_line_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, seen = job_of(tmp_path, monkeypatch, Dying), list[Progress]()
    summary = run(job, seen.append)
    assert (summary.answered, summary.failed) == (19, 1)
    [lost] = read(Path(job.errors).read_bytes())
    assert (lost["custom_id"], lost["error"]["code"]) == ("id-7", PROCESS_ENDED)
    assert max(progress.tries for progress in seen) > 1


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Data sets its own old settings
def test_a_job_whose_models_end_each_actor_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, monkeypatch, Unloadable)
    with pytest.raises(TurnoutError, match=r"2 processes ended while they loaded the models.*run it again"):
        run(job)
    assert JobDirectory(job.work).tries(LOADING).begun == 0
