"""The OpenAI-compatible endpoints over the service, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deployments.service import GenerationService


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_completion_has_openais_shape_and_turnouts_usage(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 4, "user": "u", "store": True, "metadata": {"a": "b"}}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 4, 9)
    assert usage["turnout"]["models"]["large"]["generated_tokens"] == 2
    assert set(usage["turnout"]["cost"]["spent"]) == {"paper", "flops", "wall_s", "usd"}
    assert set(usage["turnout"]["cost"]["large_only"]) == {"paper", "flops", "wall_s", "usd"}


@pytest.mark.parametrize(
    ("prompt", "num_prompt_tokens"),
    [("hi", 2), (["hi", "you"], 5), ([1, 2, 3], 3), ([[1, 2], [3]], 3)],
)
async def test_every_form_of_prompt(http: httpx.AsyncClient, prompt: Any, num_prompt_tokens: int) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "n": 2}
    answer = (await http.post("/v1/completions", json=body)).json()
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * prompts))
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
    assert answer["usage"]["completion_tokens"] == 4 * prompts


async def test_echo_with_logprobs_covers_the_prompt(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": "xy", "max_tokens": 2, "echo": True, "logprobs": 1}
    for prompt in ("xy", [120, 121]):
        choice = (await http.post("/v1/completions", json={**body, "prompt": prompt})).json()["choices"][0]
        assert choice["text"] == "xyab"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["x", "y", "a", "b"]
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert logprobs["top_logprobs"] == [None, {"y": -0.5}, {"a": -0.5}, {"b": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_no_new_tokens_scores_the_prompt(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"model": "demo", "prompt": ["xyz", "xy"], "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *parts, last = events((await http.post(COMPLETIONS, json={**body, **options})).text)
        choices, usage = [choice for part in parts for choice in part["choices"]], last["usage"]
    else:
        answer = (await http.post(COMPLETIONS, json=body)).json()
        choices, usage = answer["choices"], answer["usage"]
    assert [(each["index"], each["text"]) for each in choices] == [(0, "xyz"), (1, "xyz"), (2, "xy"), (3, "xy")]
    assert all(each["finish_reason"] == "length" for each in choices)
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)


async def test_an_echo_of_no_new_tokens_without_logprobs_is_the_prompt(http: httpx.AsyncClient) -> None:
    answer = (await http.post(COMPLETIONS, json={"prompt": [120, 121], "max_tokens": 0, "echo": True})).json()
    assert answer["choices"][0]["text"] == "xy"
    assert answer["usage"]["total_tokens"] == 2
    refused = await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": False, "echo": True})
    assert refused.status_code == 400


async def test_a_stream_ends_with_usage_only_when_asked(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": ["one", "two"], "max_tokens": 3, "stream": True, "echo": True}
    plain = events((await http.post("/v1/completions", json=body)).text)
    texts = {0: "", 1: ""}
    for event in plain:
        assert "usage" not in event
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "oneabc", 1: "twoabc"}
    body["stream_options"] = {"include_usage": True}
    *parts, last = events((await http.post("/v1/completions", json=body)).text)
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


async def test_events_are_cut_by_no_reader_of_lines(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """`str.splitlines` cuts at Unicode's separators, as `iter_lines` of httpx and requests do."""
    said = "a\u2028b\u2029c\u0085d\u00e9\u000b\u001c"
    monkeypatch.setattr("tests.deployments.fake_pool.TOOL_CALL", said)
    body = {"prompt": "tool", "max_tokens": len(said), "stream": True, "logprobs": 1}
    text = (await http.post("/v1/completions", json=body)).text
    found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line not in ("", "data: [DONE]")]
    assert "".join(event["choices"][0]["text"] for event in found) == said
    assert "\u00e9" in text


async def test_chat_answers_whole_and_streamed(http: httpx.AsyncClient) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [text_part("hi")]}],
        "max_completion_tokens": 2,
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "decoding": {"method": "plain", "params": {"window": 3}},
    }
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "ab", "refusal": None, "annotations": []}
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["a", "b"]
    assert choice["logprobs"]["content"][0]["top_logprobs"][1] == {"token": "b", "logprob": -1.5, "bytes": [98]}
    assert answer["usage"]["turnout"]["method"] == "plain"
    assert answer["usage"]["turnout"]["params"] == {"window": 3}
    streamed = events((await http.post("/v1/chat/completions", json={**body, "stream": True})).text)
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == "ab"


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REFUSED = [
    (COMPLETIONS, {"model": "nope", "prompt": "x"}, 404, "model", "demo, large, small"),
    (COMPLETIONS, {"prompt": "x", "decoding": {"method": "nope"}}, 404, "decoding.method", "entropy_adaptive"),
    (COMPLETIONS, {"prompt": "x", "decoding": {"params": {"nope": 1}}}, 400, "decoding.params.nope", "threshold"),
    (COMPLETIONS, {"prompt": "x", "decoding": {"modus": 1}}, 400, "decoding.modus", "unknown"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p", "greater than 0"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens", "integer"),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, 400, "stop.0", "string"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias.a.[key]", "integer"),
    (COMPLETIONS, {"prompt": "x", "tempratur": 1}, 400, "tempratur", "temperature"),
    (COMPLETIONS, {"prompt": "x", "stream": "perhaps"}, 400, "stream", "boolean"),
    (COMPLETIONS, {"prompt": "x", "deadline_s": 0}, 400, "deadline_s", "positive"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt.1", "not empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt.1", "token ids"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt", "string"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, 400, "prompt", "128"),
    (COMPLETIONS, {"prompt": [5, 300]}, 400, "prompt", "0 to 255"),
    (COMPLETIONS, {"prompt": "x" * 5000}, 400, "prompt", "4096"),
    (COMPLETIONS, {}, 400, "prompt", "needed"),
    (CHAT, {}, 400, "messages", "needed"),
    (CHAT, {"messages": []}, 400, "messages", "empty"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", "system, user, assistant"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", "is needed"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content.0", "text"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, 400, "max_completion_tokens", "greater than"),
    (CHAT, {"messages": USER, "max_completion_tokens": 1, "max_tokens": 2}, 400, "max_tokens", "conflicts"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs.tools", "is set by"),
    (CHAT, {"messages": USER, "continue_final_message": True}, 400, "continue_final_message", "needs a last message"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, 400, "top_logprobs", "logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    (CHAT, {"messages": USER, "tools": [{}]}, 400, "tools.0.function", "required"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "param", "allowed"), REFUSED)
async def test_bad_input_is_refused_in_openais_shape(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str, allowed: str, stream: bool
) -> None:
    answer = await http.post(path, json={"stream": stream, **body})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert allowed in error["message"]
    assert error["message"].startswith(f"{param}: ")
    assert (await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(
    ("data", "param", "reason"),
    [
        (b"", "body", "malformed JSON"),
        (b"{", "body", "line 1, column 2"),
        (b'{"prompt": "\xff"}', "body", "UTF-8"),
        (b"[1]", "body", "JSON object"),
        (b'{"prompt": NaN}', "body", "NaN"),
        (b"[" * 100000, "body", "nested"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "body", "too long"),
        (b'{"prompt": "\\ud800"}', "prompt", "surrogate"),
    ],
)
async def test_malformed_bodies_are_refused(http: httpx.AsyncClient, data: bytes, param: str, reason: str) -> None:
    answer = await http.post(COMPLETIONS, content=data)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert reason in answer.json()["error"]["message"]


async def test_a_body_has_a_largest_size(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETIONS, content=b" " * ((4 << 20) + 1))
    assert answer.status_code == 413
    assert "bytes" in answer.json()["error"]["message"]


async def test_our_faults_leak_nothing(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETIONS, json={"prompt": "crash", "max_tokens": 9})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.json()["error"]["message"].startswith("internal error, request id ")
    streamed = await http.post(COMPLETIONS, json={"prompt": "crash", "max_tokens": 9, "stream": True})
    assert "internal error, request id " in streamed.text
    assert "[DONE]" not in streamed.text
    assert "ZeroDivision" not in answer.text + streamed.text
    assert "/etc" not in answer.text + streamed.text


async def test_a_deadline_is_504(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETIONS, json={"prompt": "wait", "deadline_s": 0.05})
    assert answer.status_code == 504
    assert answer.json()["error"]["param"] == "deadline_s"


async def test_one_failing_prompt_ends_the_others(http: httpx.AsyncClient, service: GenerationService) -> None:
    for stream in (False, True):
        body = {"prompt": ["wait", "crash"], "max_tokens": 9, "stream": stream}
        answer = await http.post(COMPLETIONS, json=body)
        assert "internal error" in answer.text
        assert (await service.stats())["demo"][0].requests == 0


async def test_models_health_and_metrics(http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["demo", "small", "large"]
    assert models["data"][0]["turnout"]["roles"] == {"small": "small", "large": "large"}
    assert models["data"][0]["turnout"]["ends"] == [{"id": 2, "text": "</s>"}]
    assert models["data"][0]["turnout"]["ends_source"] == "config.json"
    assert (await http.get("/v1/models/large")).json()["id"] == "large"
    missing = await http.get("/v1/models/nope")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
    assert 'turnout_ttft_seconds_count{model="demo"} 1.0' in (await http.get("/metrics")).text


async def test_unknown_paths_and_verbs_have_the_same_error_shape(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    wrong = await http.get(COMPLETIONS)
    assert (wrong.status_code, set(wrong.json())) == (405, {"error"})
