"""Structures and tool calls through the served application: HTTP whole and streamed, gRPC, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from deployments.app import RunningServer
from tests.deployments.conftest import assert_freed
from tests.deployments.fake_pool import TOOL_CALL
from turnout.client import Client
from turnout.errors import Code, TurnoutError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["right", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER: Any = [{"role": "user", "content": "Is it?"}]


def assert_fits(text: str) -> None:
    made = json.loads(text)
    assert made.keys() == SCHEMA["properties"].keys()
    assert isinstance(made["right"], bool)
    assert made["size"] in ("small", "large")


def test_a_response_format_holds_whole_and_streamed(openai_client: openai.OpenAI, server: RunningServer) -> None:
    asked: Any = {"model": "real", "messages": USER, "max_tokens": 60, "seed": 3, "response_format": FORMAT}
    whole = openai_client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    assert_fits(whole.message.content or "")
    chunks = [
        chunk.choices[0] for chunk in openai_client.chat.completions.create(**asked, stream=True) if chunk.choices
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == "stop"
    assert_freed(server, "real")


def test_what_cannot_be_followed_is_refused_in_the_bodys_own_words(
    served_http: httpx.Client, server: RunningServer
) -> None:
    refused = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    for stream in (False, True):
        body = {"model": "real", "messages": USER, "response_format": refused, "stream": stream}
        answer = served_http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("response_format")
        assert "uniqueItems" in answer.json()["error"]["message"]
    body = {"model": "real", "prompt": "x", "decoding": {"structure": {"regex": "a("}}}
    assert served_http.post("/v1/completions", json=body).json()["error"]["param"] == "decoding.structure"
    body = {"model": "real", "messages": USER, "tools": TOOLS, "response_format": refused}
    for field in ("response_format.json_schema.schema.uniqueItems", "tools.0.function.parameters.uniqueItems"):
        assert served_http.post("/v1/chat/completions", json=body).json()["error"]["param"] == field
        function = {"name": "f", "parameters": {"properties": {}, "uniqueItems": True}}
        body |= {"tools": [{"function": function}], "response_format": {"type": "json_object"}}
    assert_freed(server, "real")


def test_a_tool_call_whole_and_streamed(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "tool"}], "tools": TOOLS}
    asked["max_tokens"] = len(TOOL_CALL)
    whole = openai_client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me see.\n"
    [call] = whole.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})  # type: ignore[union-attr]
    chunks = [
        chunk.choices[0] for chunk in openai_client.chat.completions.create(**asked, stream=True) if chunk.choices
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see.\n"
    calls = [each for chunk in chunks for each in chunk.delta.tool_calls or []]
    functions = [each.function for each in calls if each.function]
    assert [each.name for each in functions if each.name] == ["weather"]
    assert "".join(each.arguments or "" for each in functions) == call.function.arguments  # type: ignore[union-attr]
    assert len(functions) > 5
    assert [each.id for each in calls if each.id] == [calls[0].id]
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_structure_over_grpc(server: RunningServer) -> None:
    with Client(server.grpc_address) as client:
        options: dict[str, Any] = {"model": "real", "max_tokens": 20, "structure": {"regex": "[0-9]{3}-[a-c]{2}"}}
        whole = client.generate("x", **options)
        assert re.fullmatch("[0-9]{3}-[a-c]{2}", whole.text)
        with client.stream("x", **options, method="speculative") as stream:
            assert re.fullmatch("[0-9]{3}-[a-c]{2}", "".join(chunk.text for chunk in stream))
        with pytest.raises(TurnoutError, match="no text fits") as refused:
            client.generate("x", model="real", structure={"json_schema": False})
        assert refused.value.code is Code.INVALID_ARGUMENT
        assert refused.value.field == "structure"


def test_a_tool_call_over_grpc(server: RunningServer) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "tool"}], "tools": TOOLS, "max_tokens": len(TOOL_CALL)}
    with Client(server.grpc_address) as client:
        whole = client.generate(model="demo", **asked)
        with client.stream(model="demo", **asked) as stream:
            chunks = list(stream)
        said = "".join(chunk.text for chunk in chunks)
        for text, [call] in ((whole.text, whole.tool_calls), (said, chunks[-1].tool_calls)):
            assert (text, call.name, json.loads(call.arguments)) == ("Let me see.\n", "weather", {"city": "Bern"})


def test_tools_and_a_structure_together_where_the_template_has_no_place_for_tools(
    openai_client: openai.OpenAI, server: RunningServer
) -> None:
    cities = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**cities, "additionalProperties": False}}
    asked: Any = {"model": "real", "messages": USER, "tools": [{"type": "function", "function": function}]}
    asked |= {"max_tokens": 200, "seed": 3, "tool_choice": "required", "parallel_tool_calls": False}
    [call] = openai_client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Oslo")  # type: ignore[union-attr]
    chunks = openai_client.chat.completions.create(**asked, stream=True)
    parts = [each for chunk in chunks if chunk.choices for each in chunk.choices[0].delta.tool_calls or []]
    assert "".join(each.function.arguments or "" for each in parts if each.function) == call.function.arguments  # type: ignore[union-attr]
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "warm"},
    ]
    asked |= {"messages": history, "tool_choice": "auto", "response_format": FORMAT}
    for seed in range(3):
        choice = openai_client.chat.completions.create(**asked | {"seed": seed}).choices[0]
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
        else:
            assert_fits(choice.message.content or "")
    assert_freed(server, "real")
