from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deployments.access.usage_record import UsageRecord
from deployments.access.usage_records import UsageRecords
from deployments.access.usage_totals import RecordFiles, total
from turnout.access_config import UsageConfig
from turnout.errors import Code, TurnoutError

NOON = datetime(2026, 3, 31, 12, tzinfo=UTC)


def record(number: int, **changes: Any) -> UsageRecord:
    values: dict[str, Any] = {"time": NOON, "tenant": "a", "model": "m", "prompt_tokens": number} | changes
    return UsageRecord(request_id=f"r{number}", **values)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[UsageRecords] = []

    def records(**settings: Any) -> UsageRecords:
        made.append(UsageRecords(UsageConfig(folder=str(tmp_path / "u"), **settings)))
        return made[-1]

    yield records
    for each in made:
        each.close()


def found(folder: Path) -> list[int]:
    return [each.prompt_tokens for each in RecordFiles(folder / "u").between()]


def test_every_record_is_there_once_and_in_order_over_several_files(make: Any, tmp_path: Path) -> None:
    records = make(max_bytes=4096, sync="never")
    for number in range(300):
        records.promise()
        records.write(record(number))
        if number % 10 == 0:
            assert records.flush()
    records.close()
    files = sorted((tmp_path / "u").iterdir())
    assert len(files) > 5
    assert all(path.stat().st_size <= 4096 for path in files)
    assert found(tmp_path) == list(range(300))


def test_two_processes_do_not_share_a_file(make: Any, tmp_path: Path) -> None:
    for records in (make(), make()):
        records.promise()
        records.write(record(1))
        assert records.flush()
    assert len(list((tmp_path / "u").iterdir())) == 2


def test_there_is_room_for_every_request_that_was_let_in(make: Any) -> None:
    records = make(max_waiting=2)
    records.promise()
    records.promise()
    with pytest.raises(TurnoutError) as refusal:
        records.promise()
    assert refusal.value.code is Code.UNAVAILABLE
    records.write(record(1))
    assert records.flush()
    records.promise()


def test_a_full_disk_keeps_records_waiting_and_loses_none(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = make(max_waiting=5)
    real, full = os.write, threading.Event()
    full.set()

    def write(file: int, data: bytes) -> int:
        if full.is_set():
            real(file, data[:7])  # a part of it fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr("deployments.access.usage_records.os.write", write)
    monkeypatch.setattr("deployments.access.usage_records.RETRY_S", 0.01)
    for number in range(5):
        records.promise()
        records.write(record(number))
    assert not records.flush(0.1)
    with pytest.raises(TurnoutError):
        records.promise()
    full.clear()
    assert records.flush()
    assert records.num_waiting == 0
    assert found(tmp_path) == list(range(5))


def test_half_a_line_of_a_killed_process_is_left_out_and_said(make: Any, tmp_path: Path) -> None:
    records = make()
    records.promise()
    records.write(record(1))
    assert records.flush()
    [path] = (tmp_path / "u").iterdir()
    with path.open("ab") as file:
        file.write(b'{"time":"2026-03-31T12:00:00Z","request_id":"r2","ten')
    files = RecordFiles(tmp_path / "u")
    assert [each.prompt_tokens for each in files.between()] == [1]
    assert files.num_damaged == 1


def test_sums_and_times(tmp_path: Path, make: Any) -> None:
    records = make()
    given = [
        record(1, completion_tokens=2, tokens_by_model={"s": 2}),
        record(2, tenant="b", outcome="INTERNAL"),
        record(4, completion_tokens=8, tokens_by_model={"s": 3, "l": 5}, time=NOON + timedelta(days=1)),
    ]
    for each in given:
        records.promise()
        records.write(each)
    assert records.flush()
    files = RecordFiles(tmp_path / "u")
    sums = total(files.between())
    assert (sums["a"].requests, sums["a"].prompt_tokens, sums["a"].completion_tokens) == (2, 5, 10)
    assert sums["a"].tokens_by_model == {"s": 5, "l": 5}
    assert (sums["b"].failed, sums["b"].tokens) == (1, 2)
    assert list(total(files.between(), "day")) == ["2026-03-31", "2026-04-01"]
    late = list(files.between(since=NOON + timedelta(hours=1)))
    early = list(files.between(until=NOON + timedelta(hours=1)))
    assert (len(late), len(early)) == (1, 2)


def test_a_line_of_a_batch_that_was_answered_again_counts_once() -> None:
    def line(number: int, minute: int, tokens: int, outcome: str = "OK", batch: str = "batch-1") -> UsageRecord:
        return UsageRecord(
            time=datetime(2026, 4, 1, 12, minute, tzinfo=UTC), request_id=f"{batch}-{number}", tenant="a", model="m",
            completion_tokens=tokens, outcome=outcome, batch_id=batch,
        )  # fmt: skip

    cut, again, other = line(1, 0, 3, "UNAVAILABLE"), line(1, 9, 7), line(2, 1, 5)
    for records in ([cut, again, other], [again, other, cut], [again, cut, cut, other, again]):
        sums = total(records)["a"]
        assert (sums.requests, sums.failed, sums.completion_tokens) == (2, 0, 12)
    assert total([line(1, 0, 3), line(1, 0, 4, batch="")])["a"].requests == 2
    assert total([line(1, 0, 3, batch="")] * 2)["a"].requests == 2  # clients may give one id to two requests


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(TurnoutError, match=r"access\.usage\.folder"):
        UsageRecords(UsageConfig(folder=str(tmp_path / "file" / "u")))
