"""The real model behind `turnout serve`: HTTP, gRPC and a batch give the answers of the pool in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.served import running_server
from experiments import real_model
from tests.engine.harness import Reference
from tests.engine.margin import assert_same_tokens
from tests.kvstore.servers import until
from tests.real.conftest import TOKENS, Served
from training.data import real_text
from turnout.batches_config import BatchesConfig
from turnout.calls import ChatMessage
from turnout.client import Client
from turnout.config import TurnoutConfig
from turnout.free_ports import on_free_ports

pytestmark = pytest.mark.real

BATCH_LIMIT_S = 240.0


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TurnoutConfig]:
    batches = BatchesConfig(folder=str(tmp_path_factory.mktemp("batches")))
    config = on_free_ports(real_model.alone("float32").model_copy(update={"batches": batches}))
    with running_server(config):
        yield config


@pytest.fixture
def http(server: TurnoutConfig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server.http_port}", timeout=120) as client:
        yield client


def assert_answered(served: Served, plain: Reference, text: str, answer: str) -> None:
    """The text of the pool's own answer, up to a near tie."""
    prompt = served.chat(text)
    [expected] = served.ask([prompt])
    decoded = served.pool.decode(expected)
    if answer == decoded:
        return
    got = served.pool.tokenizer.encode(answer)

    def scores_at(place: int) -> torch.Tensor:
        return plain.logits([*prompt, *expected[:place]])[-1].log_softmax(-1)

    assert_same_tokens(expected, got, scores_at)


def test_chat_over_http(served: Served, plain: Reference, http: httpx.Client) -> None:
    for kind in real_text.KINDS:
        text = real_text.prompts(kind)[1]
        messages = [{"role": "user", "content": text}]
        body = {"model": real_model.POOL, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
        body["decoding"] = {"method": "plain"}
        reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        assert_answered(served, plain, text, reply["choices"][0]["message"]["content"])


def test_echo_has_the_log_probabilities_of_one_forward(plain: Reference, served: Served, http: httpx.Client) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    body = {"model": real_model.POOL, "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
    ids = served.pool.tokenizer.encode(text)
    rows = plain.logits(ids)[:-1].log_softmax(-1)
    expected = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = choice["logprobs"]["token_logprobs"][: len(ids)]
    assert found[0] is None
    assert torch.allclose(torch.tensor(found[1:]), expected, atol=5e-4)


def test_streams_over_grpc(served: Served, plain: Reference, server: TurnoutConfig) -> None:
    text = real_text.prompts(real_text.SCRIPTS)[0]
    with (
        Client(f"127.0.0.1:{server.server.grpc_port}") as client,
        client.stream(
            messages=(ChatMessage("user", text),), method="plain", temperature=0.0, max_tokens=TOKENS
        ) as stream,
    ):
        answer = "".join(chunk.text for chunk in stream)
        assert stream.usage is not None
    assert_answered(served, plain, text, answer)


def test_a_batch_is_answered(served: Served, plain: Reference, http: httpx.Client) -> None:
    texts = {f"line-{number}": text for number, text in enumerate(real_text.prompts("question")[4:10])}
    lines = []
    for name, text in texts.items():
        messages = [{"role": "user", "content": text}]
        body = {"model": real_model.POOL, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
        lines.append({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})
    data = "\n".join(map(json.dumps, lines)).encode()
    file = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).raise_for_status()
    wanted = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=wanted).raise_for_status().json()

    def ended() -> bool:
        batch.update(http.get(f"/v1/batches/{batch['id']}").raise_for_status().json())
        return batch["status"] in ("completed", "failed", "expired", "cancelled")

    until(ended, BATCH_LIMIT_S)
    assert batch["status"] == "completed", batch
    output = http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
    answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.splitlines())}
    assert answers.keys() == texts.keys()
    for name, text in texts.items():
        assert_answered(served, plain, text, answers[name]["choices"][0]["message"]["content"])
