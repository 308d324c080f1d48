"""A job on a server: sent once, its lines known by the numbers and seeds of the input, its files there whole."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli import batch_client as served
from cli.batch_client import ENDED, ServedJob, left_behind, run
from deployments.batches.inputs import Defaults
from deployments.batches.job_directory import JobDirectory
from deployments.batches.lines import seed_of
from tests.batches.house import jsonl, line
from turnout.errors import Code, TurnoutError


def test_a_job_does_not_show_its_key(tmp_path: Path) -> None:
    job = ServedJob("in", "out", "err", tmp_path, "http://there", Defaults(), key="tk_SECRET")
    assert "SECRET" not in repr(job)
    assert job.key == "tk_SECRET"


class Server:
    """Takes batches, which have a `status` at once; `loses` an answer, or has no `files`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[dict[str, Any]] = []
        self.uploads: list[bytes] = []
        self.files = {"out": b'{"custom_id": "a"}\n', "err": b""}
        self.loses = False
        self.away: list[int] = []  # statuses that looking at a batch gets instead; 0: no answer at all
        self.status, self.no_file = "completed", False
        self.reasons: dict[str, Any] | None = None
        client = partial(httpx.Client, transport=httpx.MockTransport(self.answer))
        monkeypatch.setattr(served.httpx, "Client", client)

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/files":
            self.uploads.append(request.read())
            return httpx.Response(200, json={"id": "in"})
        if path.startswith("/v1/files/"):
            data = self.files.get(path.split("/")[3])
            return httpx.Response(404) if data is None else httpx.Response(200, content=data)
        if path.endswith("/cancel"):
            return self.cancel(path.split("/")[3])
        if request.method == "POST":
            ended = {"status": self.status, "errors": self.reasons}
            ended |= {f"{name}_file_id": None if self.no_file else name[:3] for name in ("output", "error")}
            counts = {"total": 2, "completed": 2, "failed": 0}
            wanted = json.loads(request.read())
            self.batches.append({"id": f"b{len(self.batches)}", "request_counts": counts, **ended, **wanted})
            if self.loses:
                raise httpx.ReadError("the connection broke")
            return httpx.Response(200, json=self.batches[-1])
        if path == "/v1/batches":
            return httpx.Response(200, json={"data": self.batches, "has_more": False})
        if self.away and request.method == "GET":
            if (status := self.away.pop(0)) == 0:
                raise httpx.ConnectError("nobody is there")
            return httpx.Response(status)
        return httpx.Response(200, json=next(each for each in self.batches if path.endswith(each["id"])))

    def cancel(self, batch_id: str) -> httpx.Response:
        batch = next(each for each in self.batches if each["id"] == batch_id)
        if batch["status"] in ENDED:
            return httpx.Response(400, json={"error": {"message": "has ended"}})
        batch["status"] = "cancelling"
        return httpx.Response(200, json=batch)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


@pytest.fixture
def job(tmp_path: Path) -> ServedJob:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([line("a"), "{no json", "", line("b", seed=5)]))
    target, errors = str(tmp_path / "out.jsonl"), str(tmp_path / "err.jsonl")
    return ServedJob(str(source), target, errors, tmp_path / "work", "http://test", Defaults(True, {}), seed=7)


def test_a_batch_whose_answer_never_came_is_not_sent_again(server: Server, job: ServedJob) -> None:
    server.loses = True
    with pytest.raises(TurnoutError, match="the connection broke"):
        run(job)
    server.loses = False
    assert run(job)["id"] == "b0"
    assert run(job)["id"] == "b0"
    assert len(server.batches) == 1
    assert run(job, fresh=True)["id"] == "b1"


@pytest.mark.parametrize("kept", [0, 1])
def test_a_full_disk_under_what_is_kept_of_a_job_is_named_and_sends_nothing_twice(
    server: Server, job: ServedJob, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Before the batch is sent, and after it was: the next run then finds it on the server."""
    left, write = kept, served.write_whole

    def full(path: Path, data: bytes) -> None:
        nonlocal left
        if path.name == "sent.json" and (left := left - 1) < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(served, "write_whole", full)
        with pytest.raises(TurnoutError, match=r"work: the disk is full$") as refusal:
            run(job)
    assert refusal.value.code is Code.UNAVAILABLE
    assert len(server.batches) == kept
    assert run(job)["id"] == "b0"
    assert len(server.batches) == 1


def test_a_server_that_is_started_anew_is_waited_for_and_a_refusal_is_not(
    server: Server, job: ServedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "LOOK_S", 0.0)
    server.away = [0, 503, 0]
    assert run(job)["id"] == "b0"
    assert not server.away
    server.away = [404]
    with pytest.raises(TurnoutError, match="status 404"):
        run(job)
    monkeypatch.setattr(served, "AWAY_S", -1.0)
    server.away = [0, 0]
    with pytest.raises(TurnoutError, match="does not answer: nobody is there"):
        run(job)
    assert server.away == [0]


def test_seeds_are_those_of_a_job_without_a_server(server: Server, job: ServedJob) -> None:
    run(job)
    sent = [json.loads(each) for each in server.uploads[0].splitlines() if each.startswith(b'{"custom_id"')]
    assert [each["body"]["seed"] for each in sent] == [seed_of(7, 1), 5]


def test_lines_are_numbered_as_in_the_input(server: Server, job: ServedJob) -> None:
    error = {"code": "invalid_line", "message": "line 2: is bad", "param": None, "line": 2}
    server.files["err"] = json.dumps({"id": "r", "custom_id": "b", "response": None, "error": error}).encode()
    run(job)
    records = [json.loads(each) for each in Path(job.errors).read_text().splitlines()]
    assert [each["error"]["line"] for each in records] == [2, 4]
    assert records[1]["error"]["message"] == "line 4: is bad"


def test_a_file_that_is_gone_leaves_the_old_one(server: Server, job: ServedJob) -> None:
    Path(job.target).write_text("old")
    del server.files["out"]
    with pytest.raises(TurnoutError, match="status 404"):
        run(job)
    assert Path(job.target).read_text() == "old"


def test_what_was_sent_before_is_cancelled_when_it_is_sent_again(server: Server, job: ServedJob) -> None:
    server.status = "in_progress"

    def stop(batch: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, stop)
    with pytest.raises(KeyboardInterrupt):
        run(job, stop)
    assert [each["status"] for each in server.batches] == ["in_progress"]
    server.status = "completed"
    run(job, fresh=True)
    assert [each["status"] for each in server.batches] == ["cancelling", "completed"]


def test_a_job_is_ended_from_outside_and_what_was_answered_is_fetched(server: Server, job: ServedJob) -> None:
    with pytest.raises(TurnoutError, match="knows of no batch"):
        run(job, cancel=True)
    server.status = "in_progress"

    def stop(batch: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, stop)

    def end(batch: dict[str, Any]) -> None:
        batch_on_server = server.batches[0]
        assert batch["status"] in ("cancelling", "cancelled")
        batch_on_server["status"] = "cancelled"

    assert run(job, end, cancel=True)["status"] == "cancelled"
    assert Path(job.target).read_text() == '{"custom_id": "a"}\n'
    assert len(server.batches) == 1


def test_who_stops_waiting_learns_where_the_job_goes_on_and_how_it_is_ended(server: Server, job: ServedJob) -> None:
    assert left_behind(job) == "nothing was sent to http://test"
    server.loses = True
    with pytest.raises(TurnoutError, match="the connection broke"):
        run(job)
    assert left_behind(job).startswith("what may have been sent continues on http://test")
    server.loses, server.status = False, "in_progress"

    def stop(batch: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, stop)
    assert left_behind(job) == "b0 continues on http://test: run it again to wait for it, or with --cancel to end it"
    assert left_behind(job, cancel=True).startswith("b0 is being cancelled on http://test; run it again")


def test_two_runs_do_not_send_a_job_twice(server: Server, job: ServedJob) -> None:
    with JobDirectory(job.work).held(), pytest.raises(TurnoutError, match="another run"):
        run(job)
    assert server.batches == []
    assert run(job)["id"] == "b0"


ANSWER: dict[str, Any] = {
    "choices": [{"index": 0, "text": "ab", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


def test_what_the_answers_of_a_server_used_is_added_up(server: Server, job: ServedJob) -> None:
    cost = {"spent": {"flops": 3.0}, "large_only": {"flops": 4.0}}
    usage = {**ANSWER["usage"], "prompt_tokens_details": {"cached_tokens": 1}, "turnout": {"cost": cost}}
    record = {"id": "r", "custom_id": "a", "response": {"status_code": 200, "body": {**ANSWER, "usage": usage}}}
    server.files["out"] = f"{json.dumps(record)}\n".encode() * 3
    assert run(job)["turnout"] == {"completion_tokens": 6, "cached_share": 1 / 3, "cost_of_large": 0.75}
    assert len(Path(job.target).read_text().splitlines()) == 3
    server.files["out"] = b'{"custom_id": "a"}\n'  # of a server that does not say
    assert run(job)["turnout"]["cost_of_large"] is None


def test_answers_of_a_server_are_columns_where_parquet_is_asked_for(server: Server, job: ServedJob) -> None:
    import pyarrow.parquet as pq

    record = {"id": "r", "custom_id": "a", "response": {"status_code": 200, "body": ANSWER}, "error": None}
    server.files["out"] = f"{json.dumps(record)}\n".encode() * 2
    target = job.target.replace(".jsonl", ".parquet")
    run(replace(job, target=target))
    rows = pq.read_table(target).to_pylist()
    assert [(row["custom_id"], row["text"], row["completion_tokens"]) for row in rows] == [("a", "ab", 2)] * 2
    assert json.loads(rows[0]["response"]) == ANSWER


def test_files_of_a_run_before_are_not_left_beside_a_new_one(server: Server, job: ServedJob) -> None:
    Path(job.source).write_bytes(jsonl([line("a")]))
    for path in (job.target, job.errors):
        Path(path).write_text("old")
    server.no_file = True
    run(job)
    assert Path(job.target).read_text() == ""
    assert not Path(job.errors).exists()


def test_a_batch_that_failed_says_why_and_hands_its_errors_over(server: Server, job: ServedJob) -> None:
    server.status = "failed"
    server.reasons = {"data": [{"message": "the file has no line"}]}
    with pytest.raises(TurnoutError, match="the file has no line; --fresh sends it again"):
        run(job)
    assert [json.loads(each)["error"]["line"] for each in Path(job.errors).read_text().splitlines()] == [2]
