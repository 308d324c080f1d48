"""A job's folder after a kill while it was being emptied, and with files of Ray's or of ours that were cut short."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments.batches import job_directory as workplace_module
from deployments.batches.disk import named
from deployments.batches.job_directory import NAMES, JobDirectory
from deployments.batches.offline import _known, check_done
from tests.batches.test_workplace import JOB, answer_all, answerer, lines, outputs, place_of
from turnout.errors import Code, TurnoutError


class KilledError(Exception):
    """Where a process would have ended."""


def told(good: list[Any], bad: list[Any]) -> tuple[list[Any], list[Any]]:
    """What answers say, but for when they were made."""
    texts = [(each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in good]
    return texts, [each["error"] for each in bad]


@pytest.mark.parametrize("removed", range(len(NAMES)))
def test_a_kill_while_a_job_is_forgotten_loses_no_line_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    place = place_of(tmp_path)
    answer_all(answerer(tmp_path), place)
    wanted = told(*outputs(tmp_path, place))
    left, remove = removed, workplace_module._remove

    def until_killed(path: Path) -> None:
        nonlocal left
        if not left:
            for each in sorted(path.iterdir())[::2] if path.is_dir() else ():
                remove(each)
            raise KilledError
        left -= 1
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(workplace_module, "_remove", until_killed)
        with pytest.raises(KilledError):
            place.open(JOB, fresh=True)
    again = JobDirectory(place.folder)
    again.open(JOB, fresh=False)
    again.check_blocks(again.staged or again.stage(lines(100), 8, None))
    answer_all(answerer(tmp_path), again)
    check_done(again)
    assert told(*outputs(tmp_path, again)) == wanted


def test_a_block_that_is_gone_is_missed(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    staged = place.staged
    assert staged is not None
    place.check_blocks(staged)
    block = place.folder / "in" / place.blocks()[3]
    block.unlink()
    with pytest.raises(TurnoutError, match=f"{staged.blocks - 1} blocks of {staged.blocks}.*--fresh") as refused:
        place.check_blocks(staged)
    assert refused.value.code is Code.UNAVAILABLE


def test_files_of_a_checkpoint_that_were_cut_short_are_removed(tmp_path: Path) -> None:
    table = pa.table({"block": ["one", "two"]})
    for name in ("whole", "cut", "empty", "begun.pending"):
        pq.write_table(table if name == "whole" else pa.table({"block": [name]}), tmp_path / f"{name}.parquet")
    data = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.parquet").write_bytes(b"")
    assert _known(tmp_path) == {"one", "two"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun.pending.parquet", "whole.parquet"]


def test_a_disk_that_fills_up_while_an_input_is_cut_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "ids", isolation_level=None) as ids:
        ids.execute("create table seen (id text primary key)")
        ids.execute("pragma max_page_count=3")
        many = [(f"id-{number}",) for number in range(10_000)]
        with pytest.raises(TurnoutError, match=r"^work: the disk is full$") as refused, named("work"):
            ids.executemany("insert into seen values (?)", many)
    assert refused.value.code is Code.UNAVAILABLE
