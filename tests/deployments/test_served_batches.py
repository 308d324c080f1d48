"""Batches on the served application: through the proxy, on the real engine, and through the loss of the ingress."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from cli.batch_client import ServedJob, run
from deployments.app import RunningServer
from deployments.batches.inputs import Defaults
from experiments.process_memory import tree
from tests.deployments.conftest import assert_freed, poll

ENDED = {"completed", "failed", "expired", "cancelled"}


def line(number: int, prompt: str, model: str = "demo", **body: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": prompt, **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": asked}


def begin(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Any:
    data = "".join(f"{json.dumps(each)}\n" for each in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")


def wait(client: openai.OpenAI, batch_id: str, timeout_s: float = 60.0) -> Any:
    poll(lambda: client.batches.retrieve(batch_id).status in ENDED, "the batch ends", timeout_s)
    return client.batches.retrieve(batch_id)


def content(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in client.files.content(file_id).content.splitlines()]


def test_a_batch_is_answered_and_each_answer_is_the_endpoints(openai_client: openai.OpenAI) -> None:
    lines = [line(number, f"{number}", max_tokens=number + 1) for number in range(12)]
    batch = wait(openai_client, begin(openai_client, [*lines, line(12, "bad", max_tokens=-1)]).id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 12, 1)
    rows = content(openai_client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"id-{number}" for number in range(12)]
    texts = [row["response"]["body"]["choices"][0]["text"] for row in rows]
    assert texts == [openai_client.completions.create(**each["body"]).choices[0].text for each in lines]
    [failed] = content(openai_client, batch.error_file_id)
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_file_of_prompts_is_sent_waited_for_and_fetched(server: RunningServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\n")
    defaults = Defaults(False, {"model": "demo", "max_tokens": 3})
    job = ServedJob(str(source), str(target), str(tmp_path / "err.jsonl"), tmp_path / "work", server.http_url, defaults)
    batch = run(job)
    assert (batch["status"], batch["turnout"]["cost_of_large"]) == ("completed", 0.5)
    rows = [json.loads(each) for each in target.read_text().splitlines()]
    assert [row["response"]["body"]["choices"][0]["text"] for row in rows] == ["abc", "abc"]


def test_interactive_requests_are_answered_while_a_batch_saturates_the_engine(
    server: RunningServer, openai_client: openai.OpenAI
) -> None:
    lines = [
        line(number, f"{number} is", "real", max_tokens=400, temperature=0, ignore_eos=True) for number in range(64)
    ]
    batch = begin(openai_client, lines)
    poll(lambda: server.stats()["real"][0].batch_requests > 8, "the batch is under way", 30.0)
    for _ in range(3):
        answer = openai_client.completions.create(model="real", prompt="1+1=", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
    assert openai_client.batches.retrieve(batch.id).status == "in_progress"
    openai_client.batches.cancel(batch.id)
    assert wait(openai_client, batch.id).status == "cancelled"
    assert_freed(server, "real")


@pytest.mark.cluster
def test_a_batch_goes_on_where_the_ingress_was_when_it_was_killed(openai_client: openai.OpenAI) -> None:
    batch = begin(openai_client, [line(number, "slow", max_tokens=10) for number in range(150)])
    poll(lambda: openai_client.batches.retrieve(batch.id).request_counts.completed >= 60, "some are answered", 60.0)
    [pid] = [pid for pid in tree(os.getpid()) if _is_ingress(pid)]
    kept, killed = openai_client.batches.retrieve(batch.id).request_counts.completed, time.time()
    os.kill(pid, signal.SIGKILL)

    def is_over() -> bool:
        try:
            return openai_client.batches.retrieve(batch.id).status in ENDED
        except (openai.APIConnectionError, openai.InternalServerError):
            return False  # there is no ingress just now

    poll(is_over, "the batch ends", 120.0)
    batch = openai_client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 150, 0)
    rows = content(openai_client, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"id-{number}" for number in range(150)]
    # What was answered before is not asked again.
    assert sum(row["response"]["body"]["created"] <= killed for row in rows) >= kept


def _is_ingress(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica:turnout:ingress")
    except OSError:
        return False
