"""Fields of vLLM's and SGLang's bodies: taken, ignored, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deployments.access.callers import Caller
from deployments.batches.lines import Line, answer_line
from deployments.extra_fields import UNSUPPORTED
from deployments.grpc_messages import generate_call
from deployments.schemas import IGNORED_FIELDS, ChatBody, CompletionBody, chat_job, completion_job
from tests.deployments.in_process import make_service
from turnout.client_messages import generate_request
from turnout.errors import TurnoutError
from turnout.structure import Structure
from turnout.tool_formats.grammar import CallRules

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT: dict[str, Any] = {"prompt": "xyz", "max_tokens": 3}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
COUNTED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def events(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = (await http.post(path, json={**body, "stream": True})).text.split("\n\n")[:-1]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_what_is_not_supported_is_refused_by_name(http: httpx.AsyncClient, path: str) -> None:
    body = CHAT if path == CHATS else TEXT
    for name, known in UNSUPPORTED.items():
        refused = await http.post(path, json={**body, name: {"x": 1}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert refused.json()["error"]["message"].startswith(f"{name}: is not supported: {known.why}")
    allowed = {name: known.neutral[0] for name, known in UNSUPPORTED.items() if known.neutral}
    for more in (allowed, dict.fromkeys(UNSUPPORTED)):
        assert (await http.post(path, json={**body, **more})).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_what_asks_for_nothing_is_ignored(http: httpx.AsyncClient, path: str) -> None:
    body = CHAT if path == CHATS else TEXT
    plain = (await http.post(path, json=body)).json()["choices"]
    everything = {name: {"x": ["y"]} for name in sorted(IGNORED_FIELDS)}
    assert (await http.post(path, json={**body, **everything})).json()["choices"] == plain


async def test_fields_of_the_other_endpoint_are_refused_by_name(http: httpx.AsyncClient) -> None:
    for path, body, name, value in ((CHATS, CHAT, "echo", True), (COMPLETIONS, TEXT, "top_logprobs", 1)):
        refused = await http.post(path, json={**body, name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_fields_of_another_endpoint_that_ask_for_nothing_are_ignored(http: httpx.AsyncClient) -> None:
    others: dict[str, Any] = {"tools": [], "parallel_tool_calls": True, "continue_final_message": False}
    asked: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        (CHATS, CHAT, {"echo": False, "audio": None, "best_of": 1, "add_special_tokens": False}),
        (COMPLETIONS, TEXT, {**others, "chat_template_kwargs": {}, "add_special_tokens": True}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, {"echo": False, "logprobs": False}),
    )
    for path, body, more in asked:
        answer = await http.post(path, json={**body, **more})
        assert answer.status_code == 200, answer.text
    refused = await http.post(COMPLETIONS, json={**TEXT, "parallel_tool_calls": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "parallel_tool_calls")


def test_no_field_is_in_two_classes() -> None:
    for body in (ChatBody, CompletionBody):
        assert not set(body.model_fields) & (IGNORED_FIELDS | set(UNSUPPORTED))
    assert not IGNORED_FIELDS & set(UNSUPPORTED)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRUCTURES = [
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"regex": "[0-9]+"}}, {"regex": "[0-9]+"}),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"guided_regex": "[a-z]"}, {"regex": "[a-z]"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": 'start: "a" | "b"'}, {"grammar": 'start: "a" | "b"'}),
    ({"regex": "[a-z]"}, {"regex": "[a-z]"}),
    ({"json_schema": json.dumps(SCHEMA), "response_format": {"type": "text"}}, {"json_schema": SCHEMA}),
]


@pytest.mark.parametrize(("asked", "means"), STRUCTURES, ids=lambda each: next(iter(each)))
def test_structures_by_other_names(asked: dict[str, Any], means: dict[str, Any]) -> None:
    for job in (chat_job({**CHAT, **asked}), completion_job({**TEXT, **asked})):
        found = job.calls[0].sampling.structure
        assert found is not None
        wanted = Structure.model_validate(means)
        assert found.kind == wanted.kind
        assert json.loads(found.value) == json.loads(wanted.value) if found.kind == "json_schema" else found == wanted


def test_a_grammar_of_llama_cpp_is_taken() -> None:
    for field in ("ebnf", "guided_grammar"):
        structure = (
            completion_job({**TEXT, field: 'root ::= "a" word\nword ::= [b-c]+ "d"\n'}).calls[0].sampling.structure
        )
        assert structure is not None
        lines = [line for line in structure.value.split("\n") if line]
        assert lines == ['start: "a" WORD', 'WORD: /[b-c]/+ "d"']


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a", "regex": "a"}, "regex"),
    ({"guided_regex": "a", "decoding": {"structure": {"regex": "a"}}}, "guided_regex"),
    ({"ebnf": "root ::= (", "response_format": {"type": "json_object"}}, "ebnf"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"guided_choice": []}, "guided_choice"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"priority": 2**63}, "priority"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_word_ids": [[1]]}, "bad_word_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"add_special_tokens": "perhaps"}, "add_special_tokens"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_what_makes_no_sense_is_refused(http: httpx.AsyncClient, path: str) -> None:
    body = CHAT if path == CHATS else TEXT
    for asked, field in NONSENSE:
        answer = await http.post(path, json={**body, **asked})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field)


async def test_an_answer_without_a_call_fits_a_structure_by_another_name() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    [call] = chat_job({**CHAT, "tools": [tool], "guided_regex": "a"}).calls
    assert call.sampling.structure is not None
    assert CallRules.of(call.sampling.structure).answer == Structure(kind="regex", value="a")


async def test_prompt_logprobs_and_token_ids(http: httpx.AsyncClient) -> None:
    asked = {"prompt_logprobs": 1, "return_token_ids": True, "n": 2}
    text = (await http.post(COMPLETIONS, json={**TEXT, **asked, "prompt": ["xyz", "x"]})).json()
    told = [choice["prompt_logprobs"] for choice in text["choices"]]
    assert (
        told[0]
        == told[1]
        == [None] + [{str(ord(char)): {"logprob": -0.5, "rank": None, "decoded_token": char}} for char in "yz"]
    )
    assert told[2] == told[3] == [None]
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == [[120, 121, 122]] * 2 + [[120]] * 2
    assert [choice["token_ids"] for choice in text["choices"]] == [list(b"abc")] * 4
    chat = (await http.post(CHATS, json={**CHAT, **asked})).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert [choice["token_ids"] for choice in chat["choices"]] == [list(b"abc")] * 2
    assert {choice["stop_reason"] for choice in chat["choices"]} == {None}


async def test_token_ids_of_a_stream(http: httpx.AsyncClient) -> None:
    for path, body in ((COMPLETIONS, TEXT), (CHATS, CHAT)):
        whole = (await http.post(path, json={**body, "return_token_ids": True})).json()
        parts = await events(http, path, **body, return_token_ids=True)
        holders = parts if path == CHATS else [part["choices"][0] for part in parts]
        wanted = whole if path == CHATS else whole["choices"][0]
        assert [each.get("prompt_token_ids") for each in holders] == [wanted["prompt_token_ids"]] + [None] * (
            len(parts) - 1
        )
        assert [token for part in parts for token in part["choices"][0]["token_ids"]] == list(b"abc")
        assert ["stop_reason" in part["choices"][0] for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_tokens_by_id_in_logprobs(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True}
    text = (await http.post(COMPLETIONS, json={**TEXT, **asked, "logprobs": 1, "echo": True})).json()
    logprobs = text["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{byte}" for byte in b"xyzabc"]
    assert logprobs["top_logprobs"][3] == {"token_id:97": -0.5}
    chat = (await http.post(CHATS, json={**CHAT, **asked, "logprobs": True, "top_logprobs": 1})).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{byte}" for byte in b"abc"]
    assert [each["bytes"] for each in content] == [[byte] for byte in b"abc"]
    assert [each["top_logprobs"][0]["token"] for each in content] == [f"token_id:{byte}" for byte in b"abc"]


async def test_counts_in_every_part_of_a_stream(http: httpx.AsyncClient) -> None:
    for path, body in ((COMPLETIONS, {**TEXT, "prompt": ["xyz", "x"], "n": 2}), (CHATS, {**CHAT, "n": 2})):
        *parts, last = await events(http, path, **body, **COUNTED)
        assert {part["usage"]["prompt_tokens"] for part in parts} == {last["usage"]["prompt_tokens"]}
        written = [part["usage"]["completion_tokens"] for part in parts]
        assert written == sorted(written)
        assert (written[0] > 0, written[-1]) == (True, last["usage"]["completion_tokens"])
        assert all(set(part["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"} for part in parts)
        asked = {**body, **COUNTED, "stream_options": {"continuous_usage_stats": True}}
        assert all("usage" not in part for part in await events(http, path, **asked))


@pytest.mark.parametrize(("header", "own", "name"), [("abc", None, "abc"), ("abc", "mine", "mine"), (None, "m", "m")])
async def test_the_callers_id_is_the_answers(
    http: httpx.AsyncClient, header: str | None, own: str | None, name: str
) -> None:
    headers = {} if header is None else {"X-Request-Id": header}
    answer = await http.post(CHATS, json={**CHAT, "request_id": own}, headers=headers)
    assert answer.json()["id"] == f"chatcmpl-{name}"


async def test_an_id_that_is_no_good_in_a_log_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHATS, json=CHAT, headers={"X-Request-Id": "x" * 129})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")


async def test_priority_and_salt_go_with_the_call() -> None:
    [call] = chat_job({**CHAT, "priority": -3, "cache_salt": "s"}).calls
    assert (call.rank, call.cache_salt) == (-3, "s")
    assert completion_job({**TEXT, "priority": 5}).calls[0].rank == 5


def test_the_python_clients_options_arrive() -> None:
    sampling: Any = {
        "min_tokens": 2,
        "bad_words": ["a", "b"],
        "allowed_token_ids": [3, 4],
        "skip_special_tokens": False,
    }
    sampling |= {"include_stop_str_in_output": True, "truncate_prompt_tokens": -1, "max_tokens": 3}
    call = generate_call(generate_request("x", None, {**sampling, "priority": -2, "cache_salt": "s"}))
    asked = completion_job({"prompt": "x", **sampling}).calls[0]
    assert (call.sampling, call.rank, call.cache_salt) == (asked.sampling, -2, "s")
    assert generate_call(generate_request("x", None, {})).sampling.skip_special_tokens
    with pytest.raises(TurnoutError, match="cache_salt"):
        generate_call(generate_request("x", None, {"cache_salt": "x" * 257}))


async def test_a_line_of_a_batch_has_the_same_fields() -> None:
    body = {**TEXT, "prompt_logprobs": 0, "return_token_ids": True}
    line = Line(1, "c", COMPLETIONS, body)
    result = await answer_line(make_service(), line, "r", lambda call: call, 1, Caller())
    [choice] = result.record["response"]["body"]["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (list(b"abc"), list(b"xyz"))
    assert len(choice["prompt_logprobs"]) == 3
