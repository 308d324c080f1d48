"""A job on a server: sent once, its lines known by the numbers and seeds of the input, its files there whole."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.batches import served
from deployments.batches.inputs import Defaults
from deployments.batches.lines import seed_of
from deployments.batches.served import ServedJob, run
from tests.batches.house import jsonl, line
from turnout.errors import TurnoutError


class Server:
    """Takes batches and has ended them at once; `loses` an answer, or has no `files`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[dict[str, Any]] = []
        self.uploads: list[bytes] = []
        self.files = {"out": b'{"custom_id": "a"}\n', "err": b""}
        self.loses = False
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
        if request.method == "POST":
            ended = {"status": "completed", "output_file_id": "out", "error_file_id": "err", "errors": None}
            counts = {"total": 2, "completed": 2, "failed": 0}
            wanted = json.loads(request.read())
            self.batches.append({"id": f"b{len(self.batches)}", "request_counts": counts, **ended, **wanted})
            if self.loses:
                raise httpx.ReadError("the connection broke")
            return httpx.Response(200, json=self.batches[-1])
        if path == "/v1/batches":
            return httpx.Response(200, json={"data": self.batches, "has_more": False})
        return httpx.Response(200, json=next(each for each in self.batches if path.endswith(each["id"])))


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
