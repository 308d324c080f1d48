"""Conversations that come back with what servers put into their answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deployments import grpc_messages
from deployments.schemas import ANSWER_FIELDS, ChatTurn, chat_job, read_json
from turnout import client_messages
from turnout.calls import ChatMessage
from turnout.errors import TurnoutError
from turnout.proto import generation_pb2 as pb
from turnout.tools import ToolCall

USER = {"role": "user", "content": "hi"}
NULLS = ("annotations", "audio", "function_call", "refusal", "reasoning", "reasoning_content", "tool_calls", "parsed")
ANSWERS = {
    "OpenAI": {"annotations": [], **dict.fromkeys(NULLS[1:])},
    "OpenAI, cited": {"annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}], "audio": {"id": "a"}},
    "OpenAI's client, parsed": {"parsed": {"a": 1}, "tool_calls": []},
    "vLLM": {"reasoning": "because", "reasoning_content": "because", "tool_calls": [], "function_call": None},
    "SGLang": {"reasoning_content": None, "tool_calls": None},
    "DeepSeek": {"reasoning_content": "because", "prefix": False},
    "OpenRouter": {
        "reasoning": "because",
        "reasoning_details": [{"type": "reasoning.text", "text": "because"}],
        "images": [{"type": "image_url", "image_url": {"url": "data:"}}],
    },
    "LiteLLM": {"provider_specific_fields": {"a": 1}, "thinking_blocks": [{"type": "thinking"}]},
    "Ollama": {"thinking": "because"},
    "Groq": {"executed_tools": [{"type": "search"}]},
    "Gemini": {"extra_content": {"google": {"thought_signature": "x"}}},
    "everything": dict.fromkeys(ANSWER_FIELDS),
}  # fmt: skip


def messages(*turns: dict[str, Any]) -> tuple[ChatMessage, ...] | None:
    return chat_job(read_json(json.dumps({"messages": [USER, *turns]}).encode())).calls[0].messages


@pytest.mark.parametrize("server", ANSWERS)
def test_an_answer_of_any_server_is_taken_back(server: str) -> None:
    said = {"role": "assistant", "content": "hello"}
    thought = any(ANSWERS[server].get(name) for name in ("reasoning", "reasoning_content", "thinking"))
    expected = [ChatMessage("user", "hi"), ChatMessage("assistant", "hello"), ChatMessage("user", "hi")]
    expected[1] = replace(expected[1], reasoning="because" if thought else "")
    assert messages({**said, **ANSWERS[server]}, USER) == tuple(expected)


def test_answer_fields_are_no_users() -> None:
    assert set(ChatTurn.model_fields) >= ANSWER_FIELDS
    for role, name, value in (
        ("user", "reasoning_content", "x"), ("system", "refusal", "no"), ("user", "annotations", [{"a": 1}]),
    ):  # fmt: skip
        with pytest.raises(
            TurnoutError, match=rf"^messages\.1\.{name}: only allowed on messages with role `assistant`$"
        ):
            messages({"role": role, "content": "x", name: value})
    assert messages({**USER, "annotations": [], "tool_calls": []}) == messages(USER)


def test_an_unknown_field_is_still_refused() -> None:
    with pytest.raises(TurnoutError, match=r"^messages\.1\.resoning: unknown; allowed here: .*reasoning"):
        messages({"role": "assistant", "content": "x", "resoning": "y"})
    with pytest.raises(TurnoutError, match=r"^messages\.1\.prefix: "):
        messages({"role": "assistant", "content": "x", "prefix": True})


def test_a_refusal_is_what_was_said() -> None:
    assert messages({"role": "assistant", "content": None, "refusal": "I cannot."}) == messages(
        {"role": "assistant", "content": "I cannot."}
    )
    parts = [{"type": "text", "text": "No: "}, {"type": "refusal", "refusal": "I cannot."}]
    assert messages({"role": "assistant", "content": parts}) == messages(
        {"role": "assistant", "content": "No: I cannot."}
    )
    with pytest.raises(TurnoutError, match=r"^messages\.1\.content\.1: must be a text part"):
        messages({"role": "user", "content": parts})
    with pytest.raises(TurnoutError, match=r"^messages\.1\.content: is needed"):
        messages({"role": "assistant", "content": None, "annotations": []})
    thought = messages({"role": "assistant", "content": None, "reasoning": "x"})  # an answer cut in its thinking
    assert thought == (ChatMessage("user", "hi"), ChatMessage("assistant", "", reasoning="x"))


@pytest.mark.parametrize("arguments", [{"arguments": ""}, {"arguments": " \n"}, {"arguments": None}, {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: dict[str, Any]) -> None:
    function = {"name": "now", **arguments, "parsed_arguments": {"a": 1}}
    call = {"index": 0, "id": "c", "type": "function", "function": function, "extra_content": {"google": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = messages(said)
    assert found is not None
    [made] = found[1].tool_calls
    assert made == ToolCall("c", "now", "{}")
    assert made.for_template["function"]["arguments"] == {}
    over_grpc = client_messages.generate_request(None, [USER, said], {})
    assert grpc_messages.generate_call(over_grpc).messages == found


@pytest.mark.parametrize("arguments", ["[", "[]", "null", '"{}"'])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"function": {"name": "now", "arguments": arguments}}
    with pytest.raises(TurnoutError, match=r"^messages\.1\.tool_calls\.0\.function\.arguments: must be a JSON object"):
        messages({"role": "assistant", "content": "", "tool_calls": [call]})


def test_top_k_is_off_below_one_in_every_form() -> None:
    for given in (-1, 0, None):
        body = {"messages": [USER], "top_k": given}
        assert chat_job(read_json(json.dumps(body).encode())).calls[0].sampling.top_k == 0
    request = pb.GenerateRequest(prompt="x", sampling=pb.Sampling(top_k=-1))
    assert grpc_messages.generate_call(request).sampling.top_k == 0
