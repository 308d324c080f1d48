"""HTTP through Serve, with httpx and with OpenAI's own client."""

from __future__ import annotations

import httpx
import openai
import pytest

from deployments.app import RunningServer
from tests.deployments.conftest import assert_freed, poll, stats


def test_openais_client_completes_and_chats(openai_client: openai.OpenAI) -> None:
    completion = openai_client.completions.create(
        model="demo", prompt=["x", "y"], max_tokens=3, n=2, logprobs=1, echo=True
    )
    assert [choice.text for choice in completion.choices] == ["xabc", "xabc", "yabc", "yabc"]
    chat = openai_client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=2,
        logprobs=True,
        top_logprobs=1,
        extra_body={"decoding": {"method": "plain", "params": {"threshold": 0.5}}},
    )
    assert chat.choices[0].message.content == "ab"
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.model_extra is not None
    assert chat.usage.model_extra["turnout"]["params"] == {"threshold": 0.5}
    assert [model.id for model in openai_client.models.list()][:3] == ["demo", "small", "large"]


def test_openais_client_streams(openai_client: openai.OpenAI) -> None:
    stream = openai_client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "slow"}],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["a", "b", "c"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    completion = openai_client.completions.create(model="demo", prompt="hi", max_tokens=5, stream=True)
    assert "".join(part.choices[0].text for part in completion) == "abcde"


def test_openais_client_understands_refusals(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        openai_client.completions.create(model="demo", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.completions.create(model="nope", prompt="x", stream=True)
    assert missing.value.code == "model_not_found"


def test_malformed_bodies_are_refused_and_the_server_goes_on(served_http: httpx.Client) -> None:
    for data in (b"{", b"\xff", b'{"prompt": "\xff"}', b"null"):
        answer = served_http.post("/v1/completions", content=data)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "body"
        assert "Traceback" not in answer.text
    assert served_http.get("/healthz").json() == {"status": "ok"}
    assert "turnout_requests_total" in served_http.get("/metrics").text


def test_a_body_has_a_largest_size(served_http: httpx.Client) -> None:
    answer = served_http.post("/v1/completions", content=b" " * (33 << 20))
    assert answer.status_code == 413


def test_leaving_a_stream_frees_everything(served_http: httpx.Client, server: RunningServer) -> None:
    body = {"model": "demo", "prompt": ["slow", "slow"], "max_tokens": 1000, "stream": True}
    with served_http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        poll(lambda: stats(server).requests == 2, "both prompts run")
    assert_freed(server)


def test_leaving_a_whole_answer_frees_everything(served_http: httpx.Client, server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        served_http.post("/v1/completions", json={"model": "demo", "prompt": "wait"}, timeout=1.0)
    assert_freed(server)


def test_a_full_pool_is_429_with_retry_after(served_http: httpx.Client, server: RunningServer) -> None:
    body = {"model": "narrow", "prompt": ["slow"] * 4, "max_tokens": 1000}
    answer = served_http.post("/v1/completions", json=body)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert_freed(server, "narrow")


def test_the_callers_request_id_comes_back_and_names_the_answer(served_http: httpx.Client) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 2}
    for more in ({}, {"stream": True}, {"temperature": -1}):
        answer = served_http.post("/v1/completions", json={**body, **more}, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert ('"id":"cmpl-mine-1"' in answer.text.replace(" ", "")) == (answer.status_code == 200)
    own = served_http.post("/v1/completions", json=body)
    assert own.json()["id"] == f"cmpl-{own.headers['x-request-id']}"
    assert served_http.get("/version", headers={"X-Request-Id": "v"}).headers["x-request-id"] == "v"
