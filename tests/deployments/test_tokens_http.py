"""/tokenize and /detokenize say what generation would read."""

from __future__ import annotations

import httpx
import pytest

from deployments.schemas import completion_job
from deployments.service import GenerationService
from tests.deployments.fake_pool import CONTEXT
from turnout.calls import GenerateCall

MESSAGES = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "o"}]


async def test_a_prompt_there_and_back(http: httpx.AsyncClient) -> None:
    found = (await http.post("/tokenize", json={"model": "demo", "prompt": "xyz"})).json()
    assert found == {"count": 3, "max_model_len": CONTEXT, "tokens": [120, 121, 122]}
    back = await http.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": "xyz"}


@pytest.mark.parametrize("given", [True, False])
async def test_what_the_tokenizer_puts_first_is_left_out_where_a_body_says_so(
    http: httpx.AsyncClient, service: GenerationService, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[GenerateCall] = []
    tokens = service.tokens
    monkeypatch.setattr(service, "tokens", lambda call: seen.append(call) or tokens(call))
    for body in ({"prompt": "x"}, {"messages": MESSAGES}):
        answer = await http.post("/tokenize", json={**body, "add_special_tokens": given, "return_token_strs": False})
        assert answer.status_code == 200
    assert [call.add_special_tokens for call in seen] == [given, True]  # a template says by itself how it begins
    [call] = completion_job({"prompt": "x", "add_special_tokens": given}).calls
    assert call.add_special_tokens is given


async def test_a_conversation_is_read_as_generation_reads_it(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES}
    found = (await http.post("/tokenize", json=body)).json()
    answer = (await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})).json()
    assert found["count"] == answer["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "model": "none"}, "model"),
        ("/tokenize", {"messages": [{"role": "poet", "content": "x"}]}, "messages.0.role"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "prompt"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
async def test_bad_input_is_refused_by_name(http: httpx.AsyncClient, path: str, body: object, field: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == field
