"""Whoever starts reads sums: records only where nobody has summed them up yet."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deployments.access.usage_record import Spent, UsageRecord
from deployments.access.usage_records import UsageRecords
from deployments.access.usage_sums import FolderSums, read_sums, sums_path
from turnout.access_config import UsageConfig

NOON = datetime(2026, 3, 31, 12, tzinfo=UTC)
MONTH = datetime(2026, 3, 1, tzinfo=UTC)


def record(tenant: str = "a", time: datetime = NOON, tokens: int = 10) -> UsageRecord:
    cost = Spent(flops=2.0 * tokens, wall_s=0.5)
    return UsageRecord(time=time, request_id="r", tenant=tenant, model="m", prompt_tokens=tokens, cost=cost)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[UsageRecords] = []

    def records(*given: UsageRecord, close: bool = True) -> UsageRecords:
        made.append(UsageRecords(UsageConfig(folder=str(tmp_path), max_bytes=4096, sync="never")))
        write(made[-1], given)
        if close:
            made[-1].close()
        return made[-1]

    yield records
    for each in made:
        each.close()


def write(records: UsageRecords, given: Any) -> None:
    for each in given:
        records.promise()
        records.write(each)
        assert records.flush()


def looked(folder: Path) -> dict[str, Any]:
    return FolderSums(folder, lambda path: False).since(MONTH).sums


def test_records_that_are_summed_up_are_not_read(make: Any, tmp_path: Path) -> None:
    make(*(record(tenant, NOON - timedelta(days=day)) for day in range(3) for tenant in ("a", "b") for _ in range(20)))
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) > 3
    for path in files:
        path.write_bytes(b"x" * path.stat().st_size)
    whole = dict.fromkeys(("a", "b"), (200.0, 400.0, 10.0))
    assert looked(tmp_path) == {f"2026-03-{day}": whole for day in (29, 30, 31)}


def test_what_a_killed_process_left_is_read_once(make: Any, tmp_path: Path) -> None:
    make(*(record() for _ in range(3)))
    [path] = tmp_path.glob("*.jsonl")
    sums_path(path).unlink()
    with path.open("ab") as file:
        file.write(b'no record\n{"time":"2026-03')
    assert looked(tmp_path) == {"2026-03-31": {"a": (30.0, 60.0, 1.5)}}
    assert read_sums(path).num_bytes == path.stat().st_size - len('{"time":"2026-03')
    path.write_bytes(b"x" * path.stat().st_size)
    assert looked(tmp_path) == {"2026-03-31": {"a": (30.0, 60.0, 1.5)}}


@pytest.mark.parametrize("spoilt", [b"", b"{", b'{"num_bytes": 99999999, "days": {"2026-03-31": {"a": [1, 2, 3]}}}'])
def test_sums_that_cannot_be_are_made_again(make: Any, tmp_path: Path, spoilt: bytes) -> None:
    make(record())
    [path] = tmp_path.glob("*.jsonl")
    sums_path(path).write_bytes(spoilt)
    assert looked(tmp_path) == {"2026-03-31": {"a": (10.0, 20.0, 0.5)}}


def test_what_others_write_meanwhile_is_found_and_our_own_is_not(make: Any, tmp_path: Path) -> None:
    other, mine = make(record(), close=False), make(record(tokens=1000), close=False)
    sums = FolderSums(tmp_path, mine.owns)
    assert sums.since(MONTH).sums == {"2026-03-31": {"a": (10.0, 20.0, 0.5)}}
    assert sums.since(MONTH).sums == {}
    write(mine, [record(tokens=1000)])
    write(other, (record("b", tokens=7) for _ in range(40)))
    other.close()
    assert len(list(tmp_path.glob("*.jsonl"))) > 3  # it has begun files since
    assert sums.since(MONTH).sums == {"2026-03-31": {"b": (280.0, 560.0, 20.0)}}
    assert sums.since(MONTH).sums == {}


def test_files_that_cannot_be_read_or_are_older_are_left_out(make: Any, tmp_path: Path) -> None:
    make(record())
    [path] = tmp_path.glob("*.jsonl")
    (tmp_path / "usage-broken.jsonl").mkdir()
    assert looked(tmp_path) == {"2026-03-31": {"a": (10.0, 20.0, 0.5)}}
    after = datetime.fromtimestamp(path.stat().st_mtime, UTC) + timedelta(seconds=2)
    assert FolderSums(tmp_path, lambda path: path.is_dir()).since(after).sums == {}
