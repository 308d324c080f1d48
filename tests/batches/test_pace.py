"""How fast lines are done, by a clock that is set by hand; and what a user is shown of a job on a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from cli import batch as command
from cli import batch_client as served
from deployments.batches import eta as pace
from deployments.batches.eta import ProgressRate, left_s
from deployments.batches.offline import Progress
from deployments.batches.spent import Spent

COUNTS = {"total": 8, "completed": 8, "failed": 0}
USED = {"completion_tokens": 24, "cached_share": 0.5, "cost_of_large": 0.25}
END = {"id": "b0", "status": "completed", "request_counts": COUNTS, "turnout": USED}


def test_what_was_done_before_is_no_part_of_the_rate() -> None:
    now = 100.0
    made = ProgressRate(lambda: now)
    assert made.rate(50) == 0.0
    now = 110.0
    assert made.rate(70) == 2.0
    assert left_s(70, 100, 2.0) == 15.0
    assert left_s(50, 100, 0.0) is None


def serve(
    monkeypatch: pytest.MonkeyPatch, folder: Path, counts: list[int], end: dict[str, Any] | None
) -> tuple[Result, list[Any]]:
    """Of a job on a server that has done so many of 8 lines, looked at each second, and what is shown meanwhile.

    Without an end its user stops waiting.
    """
    shown: list[tuple[Any, ...]] = []
    seconds = iter(range(100))

    def run(job: Any, tell: Callable[[dict[str, Any]], None], fresh: bool, cancel: bool) -> dict[str, Any]:
        for done in counts:
            used = {"turnout": {"flops": done / 2, "flops_large_only": float(done)}}
            tell({"request_counts": {"total": 8, "completed": done, "failed": 0}, "usage": used})
        if end is None:
            raise KeyboardInterrupt
        return end

    @contextmanager
    def bar() -> Iterator[Callable[..., None]]:
        yield lambda *told: shown.append(told)

    monkeypatch.setattr(served, "run", run)
    monkeypatch.setattr(command, "_bar", bar)
    monkeypatch.setattr(pace, "ProgressRate", lambda: ProgressRate(lambda: float(next(seconds))))
    app = typer.Typer()
    app.command()(command.batch)
    asked = ["in.jsonl", str(folder / "out.jsonl"), "--server", "http://test"]
    return CliRunner().invoke(app, asked), shown


def test_a_job_on_a_server_tells_its_rate_the_time_left_and_what_it_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, shown = serve(monkeypatch, tmp_path, [0, 4, 6], END)
    assert result.exit_code == 0
    cost = "cost 0.50 x large"
    assert shown == [(0, 8, []), (4, 8, ["2.0/s", "0:02 left", cost]), (6, 8, ["2.0/s", "0:01 left", cost])]
    assert "b0 completed: 8 answers, 0 lines failed" in result.output
    assert "24 tokens, 50% of the prompts cached, FLOPs 0.25 x the large model alone" in result.output


@pytest.mark.parametrize("ended", ["expired", "cancelled"])
def test_a_job_that_ends_before_its_last_line_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: str
) -> None:
    assert serve(monkeypatch, tmp_path, [], {**END, "status": ended})[0].exit_code == 1


def test_who_stops_waiting_is_told_what_becomes_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(served, "left_behind", lambda job, cancel: f"b0 goes on on {job.server}")
    result, _ = serve(monkeypatch, tmp_path, [2], None)
    assert result.exit_code != 0
    assert "turnout: b0 goes on on http://test" in result.output


def test_a_block_that_is_begun_again_is_told() -> None:
    spent = Spent(flops=1.0, flops_large_only=4.0)
    assert command._figures(Progress(10, 5, 2.0, spent, tries=1)) == ["2.0/s", "0:02 left", "cost 0.25 x large"]
    assert command._figures(Progress(10, 5, 0.0, Spent(), tries=3)) == ["a block was begun 3 times"]
