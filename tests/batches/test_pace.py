"""How fast lines are done, by a clock that is set by hand; and what a user is shown of a job on a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli import batch as command
from deployments.batches import pace, served
from deployments.batches.pace import Pace, left_s

END = {"id": "b0", "status": "completed", "request_counts": {"total": 8, "completed": 8, "failed": 0}}


def test_what_was_done_before_is_no_part_of_the_rate() -> None:
    now = 100.0
    made = Pace(lambda: now)
    assert made.rate(50) == 0.0
    now = 110.0
    assert made.rate(70) == 2.0
    assert left_s(70, 100, 2.0) == 15.0
    assert left_s(50, 100, 0.0) is None


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path, counts: list[int], end: dict[str, Any]) -> tuple[int, Any]:
    """Of a job on a server that has done so many of 8 lines, looked at each second: exit status, and what is shown."""
    shown: list[tuple[Any, ...]] = []
    seconds = iter(range(100))

    def run(job: Any, tell: Callable[[dict[str, Any]], None], fresh: bool, cancel: bool) -> dict[str, Any]:
        for done in counts:
            tell({"request_counts": {"total": 8, "completed": done, "failed": 0}})
        return end

    @contextmanager
    def bar() -> Iterator[Callable[..., None]]:
        yield lambda *told: shown.append(told)

    monkeypatch.setattr(served, "run", run)
    monkeypatch.setattr(command, "_bar", bar)
    monkeypatch.setattr(pace, "Pace", lambda: Pace(lambda: float(next(seconds))))
    app = typer.Typer()
    app.command()(command.batch)
    asked = ["in.jsonl", str(folder / "out.jsonl"), "--server", "http://test"]
    return CliRunner().invoke(app, asked).exit_code, shown


def test_a_job_on_a_server_tells_its_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, shown = serve(monkeypatch, tmp_path, [0, 4, 6], END)
    assert status == 0
    assert shown == [(0, 8, 0.0, None, None), (4, 8, 2.0, 2.0, None), (6, 8, 2.0, 1.0, None)]


@pytest.mark.parametrize("ended", ["expired", "cancelled"])
def test_a_job_that_ends_before_its_last_line_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: str
) -> None:
    assert serve(monkeypatch, tmp_path, [], {**END, "status": ended})[0] == 1
