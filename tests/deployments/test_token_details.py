"""Tokens with their provenance, in HTTP answers and over gRPC: where the request asks, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from deployments import grpc_messages
from deployments.grpc_messages import generate_call
from deployments.openai_format import ChatFormat, CompletionFormat, token_object
from deployments.service import Answer
from pool.text import TextTokenizer
from pool.usage import token_out
from tests.client.test_client_messages import USAGE
from training.random_models import byte_tokenizer
from turnout import client_messages as wire
from turnout.calls import Chunk, TokenOut
from turnout.proto import generation_pb2 as pb
from turnout.types import Token, TokenKind

DETAILED = TokenOut(7, "x", "large", TokenKind.RECOVERED, -0.5, 1.25, ((7, "x", -0.5), (8, "y", -2.0)), ("a", "<b>"))


def body(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi", "max_tokens": 4, "logprobs": 1, "decoding": {"tokens": True}, **more}


async def test_a_choice_has_its_tokens(http: httpx.AsyncClient) -> None:
    choice = (await http.post("/v1/completions", json=body())).json()["choices"][0]
    assert choice["turnout"]["tokens"][1] == {
        "id": ord("b"), "text": "b", "bytes": None, "source": "large", "kind": "accepted", "entropy_bits": 1.25,
        "logprob": -0.5, "top": [{"text": "b", "logprob": -0.5}], "rejected": [],
        "thinking": False,
    }  # fmt: skip
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == list("abcd")


async def test_a_stream_has_the_same_tokens_as_the_whole(http: httpx.AsyncClient) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    asked = {key: value for key, value in body(**messages).items() if key != "prompt"}
    whole = (await http.post("/v1/chat/completions", json=asked)).json()["choices"][0]["turnout"]["tokens"]
    answer = await http.post("/v1/chat/completions", json=asked | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    assert [token for event in events for token in event["choices"][0]["turnout"]["tokens"]] == whole
    assert len(whole) == 4


def test_bytes_of_tokens_that_are_parts_of_characters(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer, said = TextTokenizer(tmp_path), "é€😀"
    ids = tokenizer.encode(said)
    text = tokenizer.detokenizer()
    parts = [
        token_out(Token(each, "m", TokenKind.DECODED, -0.5, top=((each, -0.5), (other, -2.0))), text)
        for each, other in zip(ids, reversed(ids), strict=True)
    ]
    told = ChatFormat().choice(Chunk(0, said, tuple(parts)), True)["logprobs"]["content"]
    assert bytes(byte for each in told for byte in each["bytes"]).decode() == said
    other = bytes(byte for each in told for byte in each["top_logprobs"][1]["bytes"])
    assert other == bytes(reversed(said.encode()))
    detailed = [token_object(part) for part in parts]
    assert bytes(byte for each in detailed for byte in each["bytes"]).decode() == said
    assert "".join(each["text"] for each in detailed) == said
    tops = CompletionFormat().choice(Chunk(0, said, tuple(parts)), True)["logprobs"]["top_logprobs"]
    assert tops[0] == {"": -0.5, r"bytes:\x80": -2.0}
    assert tops[1] == {"é": -0.5, "Ø": -2.0}, "what it would have been here"


async def test_nobody_else_sees_them(http: httpx.AsyncClient) -> None:
    choice = (await http.post("/v1/completions", json=body(decoding={}))).json()["choices"][0]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    refused = await http.post("/v1/completions", json=body(token_details=True))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "token_details"


def test_details_survive_the_grpc_wire() -> None:
    call = generate_call(wire.generate_request("x", None, {"token_details": True}))
    assert call.sampling.token_details
    assert not generate_call(pb.GenerateRequest(prompt="x")).sampling.token_details
    answer = Answer((Chunk(0, "x", (DETAILED,)),), USAGE)
    assert wire.result(grpc_messages.answer_message("id", "demo", answer)).tokens == (DETAILED,)


def test_a_token_as_json_holds_all_of_it() -> None:
    assert json.loads(json.dumps(token_object(DETAILED))) == {
        "id": 7, "text": "x", "bytes": None, "source": "large", "kind": "recovered", "entropy_bits": 1.25,
        "logprob": -0.5, "top": [{"text": "x", "logprob": -0.5}, {"text": "y", "logprob": -2.0}],
        "rejected": ["a", "<b>"],
        "thinking": False,
    }  # fmt: skip
