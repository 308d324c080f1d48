"""Answers of llama.cpp's and vLLM's own servers through the router: counts, log-probabilities, refusals, leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from benchmarks.peer_servers import LLAMA, MAX_LENGTH, MODEL, VLLM
from tests.deployments.served_pool import until
from tests.neighbours.conftest import PATIENCE_S, PRICES, Street
from tests.neighbours.test_killed_under_load import Answer, body, follow, price

pytestmark = [
    pytest.mark.neighbours,
    pytest.mark.timeout(3 * PATIENCE_S),
    pytest.mark.parametrize("name", [LLAMA, VLLM]),
]

TOKENS = 8


def post(street: Street, path: str, asked: dict[str, Any]) -> httpx.Response:
    """Ask the router."""
    return httpx.post(f"{street.url}{path}", json=asked, timeout=PATIENCE_S)


def pool(name: str) -> str:
    """A pool whose large model is at this server."""
    return f"{name}-ends"


@pytest.mark.parametrize("streamed", [False, True])
async def test_counts_are_the_servers_own(street: Street, name: str, streamed: bool) -> None:
    text = "Name three colours."
    async with httpx.AsyncClient(base_url=street.url, timeout=PATIENCE_S) as client:
        own = f"{street.neighbours[name].address}/v1/chat/completions"
        expected = (await client.post(own, json=body(MODEL, text, TOKENS))).raise_for_status().json()["usage"]
        if streamed:
            answer = Answer(pool(name))
            await follow(client, answer, text, TOKENS)
            assert answer.text
            assert (answer.error, answer.finish_reason) == ("", "length")
            usage = answer.usage
        else:
            reply = await client.post("/v1/chat/completions", json=body(pool(name), text, TOKENS))
            usage = reply.raise_for_status().json()["usage"]
    for field in ("prompt_tokens", "completion_tokens"):
        assert usage[field] == expected[field]
    report = usage["turnout"]
    assert report["models"].keys() == {name}
    assert report["cost"]["spent"]["usd"] == pytest.approx(price(report))
    assert report["cost"]["spent"]["usd"] >= TOKENS * PRICES[name]["output_usd_per_mtok"] / 1e6


@pytest.mark.parametrize("most", [0, 2])
def test_log_probabilities(street: Street, name: str, most: int) -> None:
    chat = body(pool(name), "Name a colour.", TOKENS, logprobs=True, top_logprobs=most)
    choice = post(street, "/v1/chat/completions", chat).raise_for_status().json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == TOKENS
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode("utf-8", "replace") == choice["message"]["content"]
    assert all(each["logprob"] < 0 and len(each["top_logprobs"]) == most for each in tokens)
    words = {"prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0, "logprobs": most}
    asked = {"model": pool(name), "ignore_eos": True, **words}
    choice = post(street, "/v1/completions", asked).raise_for_status().json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert len(found["token_logprobs"]) == TOKENS
    assert all(each < 0 for each in found["token_logprobs"])


def test_several_answers_and_stop_strings(street: Street, name: str) -> None:
    asked = body(pool(name), "Count from one to nine in words.", 4 * TOKENS, n=2, stop=[" ", "e"])
    asked["temperature"] = 0.7  # vLLM refuses several answers that would be the same
    reply = post(street, "/v1/chat/completions", asked).raise_for_status().json()
    assert sorted(choice["index"] for choice in reply["choices"]) == [0, 1]
    for choice in reply["choices"]:
        assert not {" ", "e"} & set(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
    assert reply["usage"]["turnout"]["cost"]["spent"]["usd"] == pytest.approx(price(reply["usage"]["turnout"]))


def test_methods_over_texts_read_log_probabilities(street: Street, name: str) -> None:
    for decoding in (
        {"method": "cascade", "params": {"threshold": -1000.0, "keep_cut": True}},
        {"method": "best_of", "params": {"k": 2, "rerank": "logprob"}},
    ):
        asked = {"model": pool(name), "prompt": "One, two, three,", "max_tokens": TOKENS, "decoding": decoding}
        usage = post(street, "/v1/completions", asked).raise_for_status().json()["usage"]
        assert 0 < usage["completion_tokens"] <= TOKENS
        assert usage["turnout"]["cost"]["spent"]["usd"] == pytest.approx(price(usage["turnout"]))


def test_what_a_server_refuses_is_refused_with_its_words(street: Street, name: str) -> None:
    for asked in (body(pool(name), "word " * 2 * MAX_LENGTH, 4), body(pool(name), "hi", 4, stream=True)):
        if asked.get("stream"):
            asked["messages"][0]["content"] = "word " * 2 * MAX_LENGTH
        reply = post(street, "/v1/chat/completions", asked)
        assert reply.status_code == 400, reply.text
        message = reply.json()["error"]["message"]
        assert message.startswith(f"endpoint {name!r}: HTTP 400")
        assert "context" in message
        assert str(MAX_LENGTH) in message


async def test_a_client_that_leaves_frees_the_server(street: Street, name: str) -> None:
    neighbour = street.neighbours[name]

    async def is_held() -> bool:
        return any((await asyncio.to_thread(neighbour.held)).values())

    async def is_free() -> bool:
        return not await is_held()

    async with httpx.AsyncClient(base_url=street.url, timeout=PATIENCE_S) as client:
        asked = body(pool(name), "Tell me a long story.", MAX_LENGTH // 2, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if "content" in line:
                    await until(is_held, "the server counts it", PATIENCE_S)
                    break
        await until(is_free, "the server has stopped", PATIENCE_S)
        metrics = (await client.get("/metrics")).text
    assert f'turnout_endpoint_requests_total{{model="{name}",outcome="cancelled",pool="{pool(name)}"}}' in metrics
