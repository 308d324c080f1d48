"""A job's folder: cut once, gone on with after any crash, each line written once."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.batches import answerer as answerer_module
from deployments.batches import journal as journal_module
from deployments.batches.answerer import Answerer, Task
from deployments.batches.inputs import Fault
from deployments.batches.job_directory import JobDirectory
from deployments.batches.lines import Line, Result
from deployments.batches.offline import check_done
from deployments.batches.outputs import write_outputs
from deployments.batches.reading import WINDOW_BYTES
from deployments.batches.spent import Spent
from tests.batches.house import batch_config
from tests.deployments.fake_pool import load_fake_pool
from turnout.config import EngineConfig, TurnoutConfig
from turnout.errors import Code, TurnoutError, invalid
from turnout.throughput_config import THROUGHPUT

JOB = {"input": {"path": "in", "size": 1}}


def lines(count: int, word: str = "fast") -> Iterator[Line | Fault]:
    for number in range(1, count + 1):
        if number % 10 == 0:
            yield Fault(number, invalid("body", "is bad"))
        else:
            # Every third begins alike, so that the order of a window is not that of the input.
            prompt = f"{number % 3} {word} {number}"
            yield Line(number, f"id-{number}", "/v1/completions", {"prompt": prompt, "max_tokens": 2})


def place_of(folder: Path, count: int = 100, word: str = "fast", block_rows: int = 8) -> JobDirectory:
    place = JobDirectory(folder / "work")
    place.open(JOB, fresh=False)
    if place.staged is None:
        place.stage(lines(count, word), block_rows, None)
    return place


def answerer(folder: Path, concurrency: int = 16) -> Answerer:
    return Answerer(Task(folder / "work", batch_config(folder), "demo", 0, concurrency), load_fake_pool)


def write_both(place: JobDirectory, target: str, errors: str) -> tuple[int, int]:
    return write_outputs(target, errors, place.records(answered=True), place.records(answered=False))


def answer_all(made: Answerer, place: JobDirectory) -> None:
    for block in place.blocks():
        made({"block": [block]})


def outputs(folder: Path, place: JobDirectory) -> tuple[list[Any], list[Any]]:
    write_both(place, str(folder / "out.jsonl"), str(folder / "err.jsonl"))
    found = [folder / "out.jsonl", folder / "err.jsonl"]
    good, bad = ([json.loads(each) for each in path.read_text().splitlines()] for path in found)
    return good, bad


def test_answers_come_in_the_order_of_the_input_each_once(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    answer_all(answerer(tmp_path), place)
    good, bad = outputs(tmp_path, place)
    assert [row["custom_id"] for row in good] == [f"id-{n}" for n in range(1, 101) if n % 10]
    assert [row["error"]["line"] for row in bad] == list(range(10, 101, 10))
    spent = [place.spent(block) for block in place.blocks()]
    assert (sum(each.rows for each in spent), sum(each.answered for each in spent)) == (90, 90)
    assert sum(each.completion_tokens for each in spent) == 180
    assert place.num_redone() == 0


def test_a_job_that_is_not_whole_is_never_written_out(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    first, *others = place.blocks()
    made = answerer(tmp_path)
    for block in others:
        made({"block": [block]})
    with pytest.raises(TurnoutError, match=f"1 of {len(others) + 1} blocks were not answered, the first is {first}"):
        check_done(place)
    made({"block": [first]})
    check_done(place)
    journal = tmp_path / "work" / "done" / first
    kept = journal.read_bytes()
    for damaged in (kept[: kept.index(b"\n") + 1], b"", None):
        journal.unlink() if damaged is None else journal.write_bytes(damaged)
        with pytest.raises(TurnoutError, match=r"holds \d+ results of 8: it was changed from outside"):
            write_both(place, str(tmp_path / "out.jsonl"), str(tmp_path / "err.jsonl"))
        assert not (tmp_path / "out.jsonl").exists()
    journal.write_bytes(kept)
    assert write_both(place, str(tmp_path / "out.jsonl"), str(tmp_path / "err.jsonl")) == (90, 10)


def test_lines_that_begin_alike_lie_beside_each_other(tmp_path: Path) -> None:
    place = place_of(tmp_path, 60, block_rows=100)
    [block] = place.blocks()
    begins = [str(line.body["prompt"])[0] for line in place.lines(block)]
    assert begins == sorted(begins)


def test_the_same_input_is_cut_into_blocks_of_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert place_of(tmp_path / "a").blocks() == place_of(tmp_path / "b").blocks()


def test_of_two_lines_with_one_id_the_first_is_served(tmp_path: Path) -> None:
    place = JobDirectory(tmp_path / "work")
    place.open(JOB, fresh=False)
    body = {"prompt": "short", "max_tokens": 1}
    staged = place.stage([Line(n, "same", "/v1/completions", body) for n in (1, 2)], 8, None)
    assert (staged.lines, staged.faults) == (1, 1)
    record = json.loads((tmp_path / "work" / "faults").read_text().partition(" ")[2])
    assert (record["error"]["line"], record["custom_id"]) == (2, "same")
    assert "is that of an earlier line" in record["error"]["message"]


async def test_what_a_killed_process_had_answered_is_not_asked_again(tmp_path: Path) -> None:
    place = place_of(tmp_path, 40, word="slow", block_rows=50)
    [block] = place.blocks()
    first = answerer(tmp_path, concurrency=6)
    task = asyncio.run_coroutine_threadsafe(first.answer(block), first._loop)
    while place.partly() < 6:
        await asyncio.sleep(0.02)
    task.cancel()  # the process ends: what it held is free
    while True:
        try:
            begun = place.begin(block)
        except BlockingIOError:
            await asyncio.sleep(0.02)
        else:
            break
    assert begun is not None
    begun.close()
    kept = place.partly()
    second = answerer(tmp_path, concurrency=40)
    asked: list[str] = []
    pool = second._service._backends["demo"]._answers._pool  # type: ignore[attr-defined]
    original = pool.generate

    def generate(call: Any) -> Any:
        asked.append(call.request_id)
        return original(call)

    pool.generate = generate
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(second.answer(block), second._loop))
    assert len(asked) == 36 - kept
    good, _ = outputs(tmp_path, place)
    assert [row["custom_id"] for row in good] == [f"id-{n}" for n in range(1, 41) if n % 10]
    assert place.spent(block).answered == 36
    assert place.num_redone() == 6, "those that the first process was just asking"


def test_a_line_of_many_prompts_is_answered_by_a_pool_that_is_asked_one_line_at_once(tmp_path: Path) -> None:
    place = JobDirectory(tmp_path / "work")
    place.open(JOB, fresh=False)
    bodies = [{"prompt": ["fast"] * count, "max_tokens": 2} for count in (3, 128)]
    rows = [Line(number, f"id-{number}", "/v1/completions", body) for number, body in enumerate(bodies, 1)]
    place.stage(rows, 8, None)
    answer_all(answerer(tmp_path, concurrency=1), place)
    good, failed = outputs_without_errors(tmp_path, place)
    assert failed == 0
    assert [len(row["response"]["body"]["choices"]) for row in good] == [3, 128]


def test_what_is_finished_while_progress_is_looked_at_does_not_end_the_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(tmp_path, 8)
    [block] = place.blocks()
    begun = place.begin(block)
    assert begun is not None
    begun.append(Result(1, True, {}))
    begun.close()
    listed = list((place.folder / "part").iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([place.folder / "part" / "finished", *listed]))
    assert place.partly() == 1


def test_a_seed_belongs_to_the_line_and_not_to_the_run(tmp_path: Path) -> None:
    seeds = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        place = place_of(tmp_path / name, 20, block_rows=4 if name == "a" else 16)
        answer_all(answerer(tmp_path / name), place)
        good, _ = outputs(tmp_path / name, place)
        seeds.append([row["response"]["body"]["usage"]["turnout"]["seed"] for row in good])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 18


def test_a_folder_of_another_job_is_refused_and_made_anew_on_demand(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    with pytest.raises(TurnoutError, match=r"holds another job.*input"):
        place.open({"input": {"path": "in", "size": 2}}, fresh=False)
    assert place.open(JOB, fresh=False)
    kept = place.folder / "of the user"
    kept.touch()
    assert not place.open({"input": {"path": "in", "size": 2}}, fresh=True)
    assert place.staged is None
    assert place.blocks() == []
    assert kept.exists()


def test_a_folder_with_files_that_are_no_jobs_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "mine").touch()
    for fresh in (False, True):
        with pytest.raises(TurnoutError, match="no job's: in"):
            JobDirectory(tmp_path).open(JOB, fresh)
    assert (tmp_path / "in" / "mine").exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    place = JobDirectory(tmp_path / "work")
    with place.held(), pytest.raises(TurnoutError, match="another run"), place.held():
        pass
    with place.held():
        pass


@pytest.mark.parametrize("waits", [False, True])
async def test_a_block_that_another_process_has_finished_meanwhile_is_not_done_again(
    tmp_path: Path, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place = place_of(tmp_path, 20, block_rows=50)
    [block] = place.blocks()
    orphan, second = place.begin(block), answerer(tmp_path)
    assert orphan is not None
    asked = asyncio.run_coroutine_threadsafe(second.answer(block), second._loop) if waits else None
    while waits and f"{block} is still held" not in caplog.text:
        await asyncio.sleep(0.02)
    place.finish(block, Spent())
    done = place.folder / "done" / block
    inode = done.stat().st_ino
    orphan.close()
    if asked is not None:
        await asyncio.wrap_future(asked)
    else:
        assert place.begin(block) is None
    assert done.stat().st_ino == inode
    assert not list((place.folder / "part").iterdir())


async def test_models_that_are_away_for_long_stop_a_block_and_no_line_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(answerer_module.PASSING, Code.UNAVAILABLE, 0.5)
    place = place_of(tmp_path, 8)
    made = answerer(tmp_path)
    pool = made._service._backends["demo"]._answers._pool  # type: ignore[attr-defined]
    original = pool.generate

    async def away(call: Any) -> Any:
        raise TurnoutError(Code.UNAVAILABLE, "the models are lost")
        yield

    pool.generate = away
    with pytest.raises(TurnoutError, match="are lost"):
        answer_all(made, place)
    pool.generate = original
    answer_all(made, place)
    good, _ = outputs_without_errors(tmp_path, place)
    assert len(good) == 8


def test_errors_of_a_run_before_are_gone_where_no_line_fails(tmp_path: Path) -> None:
    place = place_of(tmp_path, 8)
    answer_all(answerer(tmp_path), place)
    (tmp_path / "err.jsonl").write_text("old")
    outputs_without_errors(tmp_path, place)
    assert not (tmp_path / "err.jsonl").exists()


def outputs_without_errors(folder: Path, place: JobDirectory) -> tuple[list[Any], int]:
    _, failed = write_both(place, str(folder / "out.jsonl"), str(folder / "err.jsonl"))
    return [json.loads(each) for each in (folder / "out.jsonl").read_text().splitlines()], failed


def test_an_input_that_breaks_off_while_it_is_cut_is_cut_again(tmp_path: Path) -> None:
    place = JobDirectory(tmp_path / "work")
    place.open(JOB, fresh=False)

    def broken() -> Iterator[Line | Fault]:
        yield from lines(50)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(TurnoutError, match="Input/output error"):
        place.stage(broken(), 4, None)
    assert place.staged is None
    assert place.stage(lines(50), 4, None).lines == 45
    assert sum(len(place.lines(block)) for block in place.blocks()) == 45


def test_a_full_disk_stops_the_job_is_named_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path, 30)

    def pwrite(handle: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journal_module.os, "pwrite", pwrite)
        with pytest.raises(TurnoutError, match="the disk is full"):
            answer_all(answerer(tmp_path), place)
    answer_all(answerer(tmp_path), place)
    good, _ = outputs(tmp_path, place)
    assert len(good) == 27


def test_an_output_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path, 30)
    answer_all(answerer(tmp_path), place)
    (tmp_path / "out.jsonl").write_text("old")
    monkeypatch.setattr("turnout.atomic_files.sync", _full)
    with pytest.raises(TurnoutError, match=r"out\.jsonl: the disk is full"):
        write_both(place, str(tmp_path / "out.jsonl"), str(tmp_path / "err.jsonl"))
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def _full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_parquet_holds_texts_and_whole_responses(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    place = place_of(tmp_path, 30)
    answer_all(answerer(tmp_path), place)
    write_both(place, str(tmp_path / "out.parquet"), str(tmp_path / "err.jsonl"))
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in table][:3] == ["id-1", "id-2", "id-3"]
    assert {row["text"] for row in table} == {"ab"}
    assert json.loads(table[0]["response"])["object"] == "text_completion"


def test_requests_are_put_in_order_no_more_bytes_at_once_than_fit(tmp_path: Path) -> None:
    place = JobDirectory(tmp_path / "work")
    place.open(JOB, fresh=False)
    long = "x" * (WINDOW_BYTES // 8)
    rows = (Line(number, f"id-{number}", "/v1/completions", {"prompt": long}) for number in range(1, 21))
    assert place.stage(rows, 256, None).lines == 20
    assert [len(place.lines(block)) for block in place.blocks()] == [8, 8, 4]


def test_of_each_block_one_answer_is_held_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(tmp_path)
    answer_all(answerer(tmp_path), place)
    held, entries = [0], journal_module.Journal.entries

    def counted(journal: journal_module.Journal, answered: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        for entry in entries(journal, answered):
            held[0] += 1
            yield entry

    monkeypatch.setattr(journal_module.Journal, "entries", counted)
    most = 0
    for number, _ in enumerate(place.records(answered=True)):
        most = max(most, held[0] - number)
    assert 1 < most <= len(place.blocks())


def test_steps_of_a_process_that_serves_nobody_are_bound_where_the_configuration_says_so(tmp_path: Path) -> None:
    plain = batch_config(tmp_path)
    told = plain.model_copy(update={"engine": EngineConfig(max_slowdown=1.5, block_size=8)})
    free, bound = (Task(tmp_path, each, "demo", 0, 4).alone.engine for each in (plain, told))
    assert free.model_dump() == {**plain.engine.model_dump(), **THROUGHPUT}
    assert bound.model_dump() == {**told.engine.model_dump(), **THROUGHPUT, "max_slowdown": 1.5}


def test_copies_on_one_machine_share_its_cores_where_the_configuration_leaves_them_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    plain = batch_config(tmp_path)
    told = plain.model_copy(update={"engine": EngineConfig(threads=5)})

    def threads(config: TurnoutConfig, beside: int) -> int | None:
        return Task(tmp_path, config, "demo", 0, 4, actors=beside, num_processes=beside).alone.engine.threads

    assert [threads(plain, beside) for beside in (1, 3, 8, 20)] == [None, 2, 1, 1]
    assert threads(told, 3) == 5
