"""POST /v1/responses: bodies, answers, events and refusals, each held against the types of OpenAI's client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.responses.output import Output, tokens_of
from tests.deployments.in_process import make_config
from tests.deployments.responses.kit import (
    EVENT,
    STOP,
    TOOL,
    answer,
    events,
    refusal,
    says,
    scripted,
    serving,
)
from turnout.calls import READ, ChatMessage, Chunk, GenerateCall, TokenOut
from turnout.errors import Code, TurnoutError, out_of_range
from turnout.responses_config import ResponsesConfig
from turnout.tools import ToolCall, ToolCallPart
from turnout.types import FinishReason, TokenKind

CALLS = (ToolCall("call_1", "weather", '{"city": "Bern"}'), ToolCall("call_2", "time", "{}"))
THINKS_AND_CALLS = [
    Chunk(0, "", (), reasoning="They ask "),
    Chunk(0, "", (), reasoning="for two."),
    Chunk(0, "Let me see.", ()),
    Chunk(0, "", (), call_parts=(ToolCallPart(0, "call_1", "weather"),)),
    Chunk(0, "", (), call_parts=(ToolCallPart(0, arguments='{"city": '), ToolCallPart(0, arguments='"Bern"}'))),
    Chunk(0, "", (), FinishReason.STOP, CALLS, (ToolCallPart(1, "call_2", "time", "{}"),)),
]
THINKS_AND_CALLS = [replace(each, tool_format=READ) for each in THINKS_AND_CALLS]  # by the pool


async def test_a_text_is_answered_with_a_whole_response() -> None:
    async with serving(scripted(says("Hel", "lo"))) as client:
        got = await answer(client, model="demo", instructions="Be brief.", metadata={"a": "b"}, user="u", temperature=0)
    assert got["id"].startswith("resp_")
    assert (got["object"], got["status"], got["model"]) == ("response", "completed", "demo")
    [item] = got["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert (got["instructions"], got["metadata"], got["user"]) == ("Be brief.", {"a": "b"}, "u")
    assert (got["temperature"], got["top_p"]) == (0.5, 0.9), "what was used"
    assert got["store"] is False, "there is no place for it"
    usage = got["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 5, 12)
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["turnout"]["method"] == "plain"


async def test_thoughts_and_calls_are_items_of_their_own_and_streamed_equals_whole() -> None:
    backend = scripted(THINKS_AND_CALLS)
    async with serving(backend) as client:
        sent = await events(client, tools=[TOOL])
    done = [each["item"] for each in sent if each["type"] == "response.output_item.done"]
    assert [each["type"] for each in done] == ["reasoning", "message", "function_call", "function_call"]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "They ask for two."}]
    calls = [(each["call_id"], each["name"], each["arguments"]) for each in done[2:]]
    assert calls == [(each.id, each.name, each.arguments) for each in CALLS]
    last = sent[-1]
    assert (last["type"], last["response"]["output"]) == ("response.completed", done)
    whole = Output(last["response"]["id"], False)
    whole.add(Chunk(0, "Let me see.", (), FinishReason.STOP, CALLS, reasoning="They ask for two."))
    whole.end()
    assert whole.items == done
    assert [each["type"].removeprefix("response.") for each in sent] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip


@st.composite
def _answers(draw: st.DrawFn) -> list[Chunk]:
    """An answer in arbitrary chunks: thoughts, text, calls with arguments in pieces; whole or cut short."""
    text = st.text("ab\n\u2028é{}", min_size=1, max_size=4)
    chunks = [Chunk(0, "", (), reasoning=each) for each in draw(st.lists(text, max_size=3))]
    chunks += [Chunk(0, each, ()) for each in draw(st.lists(text, max_size=3))]
    calls = []
    for index in range(draw(st.integers(0, 3))):
        pieces = draw(st.lists(text, max_size=3))
        calls.append(ToolCall(f"call_{index}", "f", "".join(pieces)))
        chunks.append(Chunk(0, "", (), call_parts=(ToolCallPart(index, f"call_{index}", "f"),)))
        chunks += [Chunk(0, "", (), call_parts=(ToolCallPart(index, arguments=each),)) for each in pieces]
    cut = draw(st.booleans())
    if cut:
        calls = calls[:-1]
    return [*chunks, Chunk(0, "", (), FinishReason.LENGTH if cut else FinishReason.STOP, tuple(calls))]


@given(_answers())
def test_events_carry_every_character_in_order(chunks: list[Chunk]) -> None:
    output = Output("resp_" + "0" * 32, False)
    sent = [event for chunk in chunks for event in output.add(chunk)] + output.end()
    begun: list[str] = []
    said: dict[str, str] = {}
    for number, event in enumerate(sent):
        EVENT.validate_python({**event, "sequence_number": number})
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(begun)
            begun.append(event["item"]["id"])
            said[begun[-1]] = ""
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == begun[-1], "one item after another"
            said[event["item_id"]] += event["delta"]
    texts = {
        each["id"]: each["arguments"] if "arguments" in each else each["content"][0]["text"] for each in output.items
    }
    assert said == texts
    assert list(texts) == begun
    kinds = {"reasoning": "", "message": "", "function_call": ""}
    for item in output.items:
        kinds[item["type"]] += texts[item["id"]]
    assert kinds["reasoning"] == "".join(each.reasoning for each in chunks)
    assert kinds["message"] == "".join(each.text for each in chunks)
    assert kinds["function_call"] == "".join(part.arguments for each in chunks for part in each.call_parts)
    whole = chunks[-1].finish_reason is FinishReason.STOP
    assert output.ending == ("completed" if whole else "incomplete")
    assert [item["status"] for item in output.items[:-1]] == ["completed"] * (len(output.items) - 1)


async def test_an_answer_that_was_cut_says_why() -> None:
    async with serving(scripted([Chunk(0, "ab", (), FinishReason.LENGTH)])) as client:
        got = await answer(client, max_output_tokens=2)
        last = (await events(client, max_output_tokens=2))[-1]
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert got["output"][0]["status"] == "incomplete"
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_a_stream_that_fails_ends_with_what_was_said_and_why() -> None:
    for error, code in (
        (TurnoutError(Code.INTERNAL, "it broke"), "server_error"),
        (TurnoutError(Code.RESOURCE_EXHAUSTED, "too many"), "rate_limit_exceeded"),
        (out_of_range("messages.0.content", "too long"), "invalid_prompt"),
    ):
        async with serving(scripted([Chunk(0, "ab", ())], error)) as client:
            last = (await events(client))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == code
        assert "messages" not in last["response"]["error"]["message"], "fields are called as the caller calls them"


def _token(text: str) -> TokenOut:
    return TokenOut(ord(text[0]), text, "m", TokenKind.DECODED, -0.5, top=((ord(text[0]), text, -0.5),))


async def test_log_probabilities_are_those_of_the_message() -> None:
    thought, said = [_token("t"), _token("h")], [_token("a"), _token("b")]
    chunks = [Chunk(0, "", tuple(thought), reasoning="th"), Chunk(0, "a", (said[0],)), Chunk(0, "b", (said[1],)), STOP]
    backend = scripted(chunks)
    async with serving(backend) as client:
        whole = await answer(client, include=["message.output_text.logprobs"], top_logprobs=1)
        sent = await events(client, top_logprobs=1)
    assert backend.calls[0].sampling.logprobs == 1
    reported = whole["output"][1]["content"][0]["logprobs"]
    assert [(each["token"], each["logprob"], len(each["top_logprobs"])) for each in reported] == [
        ("a", -0.5, 1),
        ("b", -0.5, 1),
    ]
    deltas = [each["logprobs"] for each in sent if each["type"] == "response.output_text.delta"]
    assert [each for delta in deltas for each in delta] == reported
    assert sent[-1]["response"]["output"][1]["content"][0]["logprobs"] == reported


def test_tokens_of_a_text_are_found_between_thoughts_and_calls() -> None:
    tokens = [_token(each) for each in ("a", "<t>", "a", "b", "{", "a")]
    said, rest = tokens_of(tokens, "ab", skipped=1)
    assert ([each.text for each in said], [each.text for each in rest]) == (["a", "b"], ["{", "a"])
    assert tokens_of(tokens, "lagging") == (tokens, [])


SAID = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
        "content": [{"type": "output_text", "text": "Hm.", "annotations": []}]}  # fmt: skip
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
GAVE = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
CALL = ToolCall("c1", "weather", '{"city": "Bern"}')
CONVERSATIONS: dict[str, tuple[dict[str, Any], list[ChatMessage]]] = {
    "a text": ({"input": "hi"}, [ChatMessage("user", "hi")]),
    "instructions": (
        {
            "instructions": "Be brief.",
            "input": [{"role": "developer", "content": "And kind."}, {"role": "user", "content": "hi"}],
        },
        [ChatMessage("system", "Be brief.\n\nAnd kind."), ChatMessage("user", "hi")],
    ),
    "parts": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": each} for each in "ab"]}]},
        [ChatMessage("user", "ab")],
    ),
    "a later system message": (
        {"input": [{"role": "user", "content": "hi"}, {"role": "system", "content": "Now stop."}]},
        [ChatMessage("user", "hi"), ChatMessage("system", "Now stop.")],
    ),
    "an answer, sent back": (
        {"input": [{"role": "user", "content": "hi"}, THOUGHT, SAID, CALLED, GAVE]},
        [
            ChatMessage("user", "hi"),
            ChatMessage("assistant", "Hm.", (CALL,), reasoning="so"),
            ChatMessage("tool", "sunny", (), "c1"),
        ],
    ),
    "calls together": (
        {"input": [{"role": "user", "content": "hi"}, CALLED, {**CALLED, "call_id": "c2"}, GAVE]},
        [
            ChatMessage("user", "hi"),
            ChatMessage("assistant", "", (CALL, ToolCall("c2", CALL.name, CALL.arguments))),
            ChatMessage("tool", "sunny", (), "c1"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_items_are_messages_to_the_model(name: str) -> None:
    body, messages = CONVERSATIONS[name]
    backend = scripted(says("ok"))
    async with serving(backend) as client:
        await answer(client, **body)
    assert list(backend.calls[0].messages or ()) == messages


CHAT_TOOL = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
OTHER = {**TOOL, "name": "time"}
CHAT_OTHER = {"type": "function", "function": {**CHAT_TOOL["function"], "name": "time"}}  # type: ignore[dict-item]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "limits": ({"max_output_tokens": 9, "temperature": 0}, {"max_tokens": 9, "temperature": 0}),
    "more": ({"seed": 4, "top_k": 2, "stop": "x"}, {"seed": 4, "top_k": 2, "stop": "x"}),
    "decoding": ({"decoding": {"method": "plain", "session": "s"}}, {"decoding": {"method": "plain", "session": "s"}}),
    "effort": ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ),
    "any object": ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    "tools": ({"tools": [TOOL, OTHER]}, {"tools": [CHAT_TOOL, CHAT_OTHER]}),
    "tools, required": (
        {"tools": [TOOL, OTHER], "tool_choice": "required"},
        {"tools": [CHAT_TOOL, CHAT_OTHER], "tool_choice": "required"},
    ),
    "tools, none": ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [CHAT_TOOL], "tool_choice": "none"}),
    "tools, named": (
        {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "name": "time"}},
        {"tools": [CHAT_TOOL, CHAT_OTHER], "tool_choice": {"type": "function", "function": {"name": "time"}}},
    ),
    "tools, allowed": (
        {"tools": [TOOL, OTHER], "tool_choice": {"type": "allowed_tools", "mode": "required",
                                                 "tools": [{"type": "function", "name": "time"}]}},
        {"tools": [CHAT_TOOL, CHAT_OTHER], "tool_choice": {"type": "allowed_tools", "mode": "required",
                                                           "tools": [{"type": "function", "name": "time"}]}},
    ),
    "ignored": (
        {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "client_metadata": {"a": "b"},
         "include": ["reasoning.encrypted_content"], "truncation": "disabled", "background": False, "tools": [],
         "tool_choice": "auto", "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
async def test_a_request_asks_for_what_the_chat_endpoint_would(name: str) -> None:
    body, chat = SAME[name]
    backend = scripted(says("ok"))
    async with serving(backend) as client:
        await answer(client, seed=4, **{key: value for key, value in body.items() if key != "seed"})
        turns = [{"role": "user", "content": "hi"}]
        got = await client.post("/v1/chat/completions", json={"messages": turns, "seed": 4, **chat})
    assert got.status_code == 200, got.text
    mine, other = map(_told, backend.calls)
    assert mine == other


def _told(call: GenerateCall) -> dict[str, Any]:
    leave = ("request_id", "whole")
    return {name: getattr(call, name) for name in call.__dataclass_fields__ if name not in leave}


ABSENT = {"type": "function", "name": "x"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
    "another item": ({"input": ["hi"]}, "input.0"),
    "an item of another type": ({"input": [{"type": "computer_call"}]}, "input.0.type"),
    "arguments": ({"input": [{**CALLED, "arguments": "1"}]}, "input.0.arguments"),
    "a call's name": ({"instructions": "x", "input": [{**CALLED, "name": "?"}]}, "input.0.name"),
    "no call id": ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
    "thoughts": ({"input": [{**THOUGHT, "content": [{"type": "x"}]}]}, "input.0.content.0"),
    "a hosted tool": ({"tools": [TOOL, {"type": "web_search"}]}, "tools.1.type"),
    "a tool's schema": ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools.0.parameters.type"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools.0.name"),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "a tool that is not there": ({"tools": [TOOL], "tool_choice": ABSENT}, "tool_choice.name"),
    "a tool that is not allowed": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ABSENT]}},
        "tool_choice.tools.0.name",
    ),
    "another choice": ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    "tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "background": ({"background": True}, "background"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "n": ({"n": 2}, "n"),
    "max_tokens": ({"max_tokens": 2}, "max_tokens"),
    "what its answer has no place for": ({"return_token_ids": True}, "return_token_ids"),
    "include": ({"include": ["everything"]}, "include.0"),
    "metadata": ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    "a method": ({"decoding": {"method": "plain", "parms": {}}}, "decoding.parms"),
    "a response that is kept nowhere": ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
    "an item that is kept nowhere": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_names_the_field_as_the_caller_does(name: str) -> None:
    body, param = REFUSED[name]
    backend = scripted(says("ok"))
    async with serving(backend) as client:
        error = await refusal(client, **body)
    assert (error["status"], error["param"]) == (400, param), error["message"]
    assert error["message"].startswith(param)
    assert backend.calls == []


async def test_faults_that_the_pool_finds_are_named_as_the_caller_does() -> None:
    for field, param in (("prompt", "input"), ("max_tokens", "max_output_tokens"), ("method", "decoding.method"),
                         ("structure", "text.format.schema"), ("reasoning_effort", "reasoning.effort")):  # fmt: skip
        backend = scripted([], out_of_range(field, "is too much"))
        async with serving(backend) as client:
            error = await refusal(client, text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}})
        assert (error["param"], error["message"]) == (param, f"{param}: is too much")


async def test_tools_of_types_that_the_configuration_names_are_left_out() -> None:
    backend = scripted(says("ok"))
    config = make_config().model_copy(update={"responses": ResponsesConfig(ignored_tools=("web_search",))})
    async with serving(backend, config) as client:
        got = await answer(client, tools=[{"type": "web_search"}, TOOL])
        await answer(client, tools=[{"type": "web_search"}], tool_choice="auto")
        error = await refusal(client, tools=[{"type": "mcp"}])
    assert [each["name"] for each in got["tools"]] == ["weather"], "the answer says what was offered"
    assert [len(call.tools) for call in backend.calls] == [1, 0]
    assert error["param"] == "tools.0.type"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "hi", "message", "function", "auto"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "id", "call_id", "output", "name", "format", "tools"]),
        inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip
FIELDS = ("input", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "stream", "store", "decoding")


async def test_no_body_is_too_strange() -> None:
    """Never a 500: whatever stands where, it is answered, or refused by name."""
    backend = scripted(says("ok"))
    statuses = set()
    async with serving(backend) as client:

        @given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), VALUES | st.just(SAID))
        def bodies(body: dict[str, Any], item: Any) -> None:
            made.append({"input": [item], **body})

        made: list[dict[str, Any]] = []
        bodies()
        for body in made:
            got = await client.post("/v1/responses", content=json.dumps(body))
            statuses.add(got.status_code)
            assert got.status_code in (200, 400), (body, got.text)
            assert got.status_code == 200 or got.json()["error"]["param"], (body, got.text)
    assert statuses == {200, 400}
