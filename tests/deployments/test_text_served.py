"""Text through a server with tokenizers of several kinds: HTTP whole and streamed, gRPC, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from pool.local_pool import LocalPool
from pool.text import TextTokenizer
from tests.deployments.access.kit import Served, served
from tests.deployments.in_process import InProcessBackend
from tests.tokenizer_kinds import save_kind
from training.random_models import llama_config, random_model
from turnout.client import Client
from turnout.config import parse_config

EMOJI = "😀😀😀"
SPACED = "Hello World the cat"
CHAT = "<|user|>Hello<|end|><|assistant|>"
CHOSEN = (EMOJI, SPACED, "é日本")


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback_strip", "unigram"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = save_kind(request.param, tmp_path_factory.mktemp(request.param))
    tokenizer = TextTokenizer(path)
    (end,) = tokenizer.eos_ids
    random_model(llama_config(len(tokenizer), eos_token_id=end, pad_token_id=None), seed=3).save_pretrained(path)
    config = parse_config(
        {
            "models": {"m": {"path": str(path), "dtype": "float32", "kv_memory_bytes": 8 << 20}},
            "pools": {"demo": {"small": "m", "large": "m"}},
            "engine": {"threads": 1},
        }
    )
    backend = InProcessBackend(PoolReplica("demo", config, LocalPool.load))
    with served(GenerationService(config, {"demo": backend}, Metrics())) as server:
        yield Site(server, tokenizer)


class Site:
    def __init__(self, server: Served, tokenizer: TextTokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.server.url}/v1/{path}", json={"temperature": 0, "max_tokens": 40, **body}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def streamed(self, path: str, **body: Any) -> list[dict[str, Any]]:
        asked = {"temperature": 0, "max_tokens": 40, "stream": True, **body}
        answer = httpx.post(f"{self.server.url}/v1/{path}", json=asked, timeout=60)
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        return [json.loads(line)["choices"][0] for line in lines[:-1]]


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def held_to(text: str) -> dict[str, Any]:
    return {"decoding": {"structure": {"choice": [text]}}}


@pytest.mark.parametrize("text", CHOSEN)
def test_an_answer_is_whole_however_it_is_asked_for(site: Site, text: str) -> None:
    asked = {**user("a"), **held_to(text), "logprobs": True, "top_logprobs": 4}
    [choice] = site.post("chat/completions", **asked)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == text
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == text
    parts = site.streamed("chat/completions", **asked)
    assert "".join(part["delta"].get("content") or "" for part in parts) == text
    pieces = [token["token"] for part in parts for token in (part["logprobs"] or {"content": []})["content"]]
    assert pieces == [token["token"] for token in tokens]


@pytest.mark.parametrize("text", CHOSEN)
def test_an_answer_is_whole_over_grpc(site: Site, text: str) -> None:
    with Client(site.server.address) as client:
        asked: Any = {"structure": {"choice": [text]}, "logprobs": 3, "temperature": 0.0, "max_tokens": 40}
        whole = client.generate("a", **asked).choices[0]
        stream = list(client.stream("a", **asked))
    assert whole.text == "".join(chunk.text for chunk in stream) == text
    for tokens in (whole.tokens, tuple(token for chunk in stream for token in chunk.tokens)):
        assert "".join(token.text for token in tokens) == text
        assert b"".join(token.data for token in tokens).decode() == text


def test_one_of_several_texts_is_sent_as_it_stands(site: Site) -> None:
    texts = [EMOJI, "👍👍👍👍"]
    schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": texts}}}
    for body in (user("a"), user("b 😀")):
        [choice] = site.post("chat/completions", **body, response_format=schema)["choices"]
        assert json.loads(choice["message"]["content"]) in texts


def test_a_prompt_that_ends_in_an_emoji_costs_the_answer_nothing(site: Site) -> None:
    [choice] = site.post("completions", prompt="a 😀", **held_to(EMOJI))["choices"]
    assert choice["text"] == EMOJI


@pytest.mark.parametrize("text", CHOSEN)
def test_offsets_are_those_of_the_text(site: Site, text: str) -> None:
    for prompt, echo in (("a", False), ("a", True), ("é b 😀", True)):
        [choice] = site.post("completions", prompt=prompt, echo=echo, logprobs=2, **held_to(text))["choices"]
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert choice["text"].endswith(text)
        places = [len("".join(found["tokens"][:place])) for place in range(len(found["tokens"]))]
        assert found["text_offset"] == places
        for token, place in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][place : place + len(token)] == token
    if text == "é日本":
        [choice] = site.post("completions", prompt="a", logprobs=0, **held_to(text))["choices"]
        assert sorted(set(choice["logprobs"]["text_offset"][:-1])) == [0, 1, 2]


def test_every_alternative_has_an_entry_of_its_own(site: Site) -> None:
    [choice] = site.post("completions", prompt="é 日", max_tokens=12, logprobs=20, temperature=1, seed=4)["choices"]
    found = choice["logprobs"]
    assert {len(top) for top in found["top_logprobs"]} == {20}
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert token not in top or top[token] == pytest.approx(logprob)


def test_a_raw_prompt_may_mean_special_tokens_and_a_message_cannot(site: Site) -> None:
    def num_tokens(path: str, **body: Any) -> int:
        count: int = site.post(path, max_tokens=1, **body)["usage"]["prompt_tokens"]
        return count

    hello = len(site.tokenizer.encode("Hello"))
    asked = num_tokens("chat/completions", **user("Hello"))
    assert num_tokens("completions", prompt="<|user|>Hello<|assistant|>") == asked
    assert num_tokens("completions", prompt=CHAT) == asked + 1
    spelled = num_tokens("completions", prompt=CHAT, decoding={"parse_special": False})
    assert spelled == len(site.tokenizer.encode(CHAT, parse_special=False)) > asked + 10
    assert num_tokens("chat/completions", **user(CHAT)) > hello + 10
    with Client(site.server.address) as client:
        counts = [
            client.generate(CHAT, max_tokens=1, parse_special=parse).usage.prompt_tokens
            for parse in (None, True, False)
        ]
    assert counts == [asked + 1, asked + 1, spelled]


def test_an_echo_shows_the_special_tokens_of_the_prompt(site: Site) -> None:
    for logprobs in ({}, {"logprobs": 1}):
        [choice] = site.post("completions", prompt="<|user|>b", echo=True, max_tokens=1, **logprobs, **held_to("b"))[
            "choices"
        ]
        assert choice["text"] == "<|user|>bb"
        if found := choice["logprobs"]:
            assert "".join(found["tokens"]) == "<|user|>bb"
            assert found["tokens"][0] == "<|user|>" or site.tokenizer.encode("")
            assert found["text_offset"] == [
                len("".join(found["tokens"][:place])) for place in range(len(found["tokens"]))
            ]
