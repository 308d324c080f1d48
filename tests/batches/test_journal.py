"""A journal keeps each result once, through crashes and full disks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.batches import journal as journal_module
from deployments.batches.journal import Journal
from deployments.batches.lines import Result
from deployments.batches.records import BatchRecord, BatchUsage
from deployments.batches.spent import Spent
from deployments.openai_format import usage_object
from tests.deployments.test_metrics import USAGE


def result(number: int, ok: bool = True, text: str = "x") -> Result:
    return Result(number, ok, {"n": number, "text": text})


@given(cut=st.integers(0, 400))
def test_wherever_a_crash_cuts_it_whole_results_stay_and_each_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    with closing(Journal(path)) as journal:
        for number in range(1, 11):
            journal.append(result(number, number % 3 > 0, "é\u2028" * number))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    with closing(Journal(path)) as journal:
        kept = whole[:cut].count(b"\n")
        assert len(journal) == kept
        for number in range(1, 11):
            journal.append(result(number, number % 3 > 0, "é\u2028" * number))
    assert path.read_bytes() == whole


def test_what_an_answer_used_is_the_same_by_its_line() -> None:
    usage = replace(USAGE, reasoning_tokens=4)
    spent = Spent.of_usage(usage)
    assert Spent.of_record({"response": {"body": {"usage": usage_object(usage)}}}) == spent
    used = BatchUsage()
    used.add(spent)
    used.add(spent)
    assert (used.output_tokens, used.reasoning_tokens) == (2 * usage.completion_tokens, 8)
    batch = BatchRecord(
        id="b", tenant="t", key_id="", seed=1, endpoint="/v1/completions", input_file_id="f", completion_window="24h",
        created_at=0, expires_at=1, usage=used,
    )  # fmt: skip
    assert batch.shown()["usage"]["output_tokens_details"] == {"reasoning_tokens": 8}


@pytest.mark.parametrize("details", [{}, {"completion_tokens_details": None}, {"completion_tokens_details": {}}])
def test_a_line_that_does_not_count_thinking_has_none(details: dict[str, Any]) -> None:
    usage: dict[str, Any] = {**usage_object(USAGE), "completion_tokens_details": None, **details}
    assert Spent.of_record({"response": {"body": {"usage": usage}}}).reasoning_tokens == 0


def test_the_first_of_two_results_stays(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j")) as journal:
        journal.append(result(1, text="first"))
        journal.append(result(1, text="second"))
        assert [record["text"] for _, record in journal.entries(answered=True)] == ["first"]


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    with closing(Journal(tmp_path / "j")) as journal:
        journal.append(result(1))
        before = (tmp_path / "j").read_bytes()

        def pwrite(handle: int, data: bytes, place: int) -> int:
            real(handle, data[:5], place)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(journal_module.os, "pwrite", pwrite)
            with pytest.raises(OSError, match="No space"):
                journal.append(result(2))
        assert (tmp_path / "j").read_bytes() == before
        assert 2 not in journal
        journal.append(result(2))
    with closing(Journal(tmp_path / "j")) as journal:
        assert len(journal) == 2


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j")), pytest.raises(BlockingIOError):
        Journal(tmp_path / "j")


def test_what_was_answered_is_counted_while_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("".join(f"+{number} {{}}\n" for number in range(1, 50_001)))
    with closing(Journal(path)) as journal, ThreadPoolExecutor(1) as threads:
        counted = threads.submit(lambda: [journal.num_answered for _ in range(2000)])
        for number in range(50_001, 52_001):
            journal.append(result(number, ok=number % 2 == 0))
        assert min(counted.result()) >= 50_000
        assert (journal.num_answered, len(journal)) == (51_000, 52_000)


def test_exports_are_in_the_order_of_the_input(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "j")) as journal:
        for number in (5, 1, 4, 2, 3):
            journal.append(result(number, ok=number != 4))
        assert journal.export(tmp_path / "out", answered=True) == 4
        assert journal.export(tmp_path / "err", answered=False) == 1
    assert [line[6:7] for line in (tmp_path / "out").read_text().splitlines()] == ["1", "2", "3", "5"]
