"""Anthropic's own client for Python, unmodified; what it gets is checked against its types, strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from deployments.http import build_http
from tests.clients.site import Site
from tests.deployments.scripted_answers import ScriptedBackend, scripted_service
from turnout.calls import Chunk
from turnout.tools import ToolCall, ToolCallPart
from turnout.types import FinishReason

anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")
types = pytest.importorskip("anthropic.types")
shared = pytest.importorskip("anthropic.types.shared")

pytestmark = pytest.mark.clients

USER = {"role": "user", "content": "What is 6*7-2?"}
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 24, "temperature": 0, "messages": [USER]}
# The API's newest models have no temperature, and so the client has none of its own.
GREEDY = {"extra_body": {"temperature": 0}}
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 24, "messages": [USER], **GREEDY}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
TOOL = {"name": "press", "description": "press a button", "input_schema": {**COLOUR, "additionalProperties": False}}


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[Any]:
    site.report.setdefault("clients", {})["Anthropic's Python"] = f"anthropic {version('anthropic')}"
    with client_of(site, "acme") as opened:
        yield opened


def client_of(site: Site, tenant: str) -> Any:
    return anthropic.Anthropic(base_url=site.url, api_key=site.keys.get(tenant, "none"), max_retries=0)


def post(site: Site, body: dict[str, Any], path: str = "/v1/messages") -> httpx.Response:
    headers = {"x-api-key": site.keys["acme"], "anthropic-version": "2023-06-01"}
    return httpx.post(f"{site.url}{path}", json=body, headers=headers, timeout=60)


def strictly(kind: Any, value: Any) -> Any:
    """The value as one of the client's types, which by itself takes anything."""
    return TypeAdapter(kind).validate_python(value, strict=True)


def said(message: Any) -> dict[str, Any]:
    """What does not differ between two answers to one question."""
    return message.model_dump(include={"content", "stop_reason", "stop_sequence", "model", "role"}, mode="json")


def test_a_message_whole_and_streamed(site: Site, client: Any) -> None:
    whole = client.messages.create(**ASKED, system=[{"type": "text", "text": "Calculate."}])
    assert whole._request_id == whole.id
    assert whole.content[0].text
    with client.messages.stream(**ASKED, system="Calculate.") as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text
    assert said(final) == said(whole)
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )
    assert whole.usage.output_tokens == final.usage.output_tokens > 0


def test_everything_that_is_sent_has_the_clients_types(site: Site) -> None:
    tools = {"tools": [TOOL], "tool_choice": {"type": "any"}, "model": "tools", "max_tokens": 200}
    for more in ({}, {"decoding": {"tokens": True}}, tools):
        strictly(types.Message, post(site, BODY | more).json())
        lines = post(site, BODY | more | {"stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        assert events.pop(1) == {"type": "ping"}  # which the client leaves out
        for event in events:
            strictly(types.RawMessageStreamEvent, event)
    for wrong in ({"max_tokens": -1}, {"model": "none"}):
        strictly(shared.ErrorResponse, post(site, BODY | wrong).json())
    counted = post(site, {"model": "demo", "messages": [USER]}, "/v1/messages/count_tokens").json()
    strictly(types.MessageTokensCount, counted)


def test_a_stop_sequence_is_named(client: Any) -> None:
    whole = client.messages.create(**ASKED).content[0].text
    stop = whole[2:4]
    for made in (
        client.messages.create(**ASKED, stop_sequences=["never so", stop]),
        client.messages.stream(**ASKED, stop_sequences=["never so", stop]).__enter__().get_final_message(),
    ):
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
        assert "".join(block.text for block in made.content) == whole[: whole.find(stop)]


def test_tokens_are_counted_as_a_message_uses_them(client: Any) -> None:
    asked = {"model": "demo", "messages": [USER], "system": "Calculate."}
    used = client.messages.create(**asked, max_tokens=1).usage
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens > 0


def test_tools_there_and_back(client: Any) -> None:
    asked = {"model": "tools", "max_tokens": 200, "tools": [TOOL], **GREEDY}
    made = client.messages.create(**asked, messages=[USER], tool_choice={"type": "tool", "name": "press"})
    assert made.stop_reason == "tool_use"
    [use] = [block for block in made.content if block.type == "tool_use"]
    assert use.name == "press"
    assert use.input["colour"] in ("red", "blue")
    with client.messages.stream(**asked, messages=[USER], tool_choice={"type": "tool", "name": "press"}) as stream:
        told = stream.get_final_message()
    assert [(block.name, block.input) for block in told.content] == [(use.name, use.input)]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "done"}]}
    turns = [USER, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**asked | {"max_tokens": 8}, messages=turns, tool_choice={"type": "none"})
    assert after.content[0].type == "text"


def test_a_schema_holds_the_output(client: Any) -> None:
    form = {"type": "json_schema", "schema": {**COLOUR, "additionalProperties": False}}
    made = client.messages.create(**ASKED, output_config={"format": form})
    assert json.loads(made.content[0].text)["colour"] in ("red", "blue")


def test_errors_are_the_clients_classes(site: Site, client: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for error, asked in (
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [image]}]}),
        (anthropic.BadRequestError, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (anthropic.NotFoundError, {"model": "claude"}),
        (anthropic.ServiceUnavailableError, {"model": "gone"}),
    ):
        with pytest.raises(error) as refused:
            client.messages.create(**ASKED | asked)
        assert refused.value.body["type"] == "error"
        assert refused.value.request_id is None or refused.value.request_id.startswith("msg_")
    with pytest.raises(anthropic.AuthenticationError):
        client_of(site, "unknown").messages.create(**ASKED)
    with pytest.raises(anthropic.PermissionDeniedError):
        client_of(site, "narrow").messages.create(**ASKED | {"model": "tools"})


def test_a_client_that_leaves_frees_what_it_held(site: Site, client: Any) -> None:
    asked = ASKED | {"model": "slow", "max_tokens": 200, "messages": [{"role": "user", "content": "slow"}]}
    with client.messages.stream(**asked) as stream:
        assert next(iter(stream)).type == "message_start"
    site.assert_idle()


async def test_thinking_and_several_calls_are_put_together_by_the_client() -> None:
    calls = (ToolCall("call_1", "press", '{"colour": "red"}'), ToolCall("call_2", "press", '{"colour": "blue"}'))
    parts = [ToolCallPart(index, call.id, call.name, call.arguments[:5]) for index, call in enumerate(calls)]
    rest = [ToolCallPart(index, arguments=call.arguments[5:]) for index, call in enumerate(calls)]
    script = [
        Chunk(0, "", (), reasoning="Red, "),
        Chunk(0, "", (), reasoning="or blue?"),
        Chunk(0, "Both", (), call_parts=()),
        Chunk(0, ".", (), call_parts=(parts[0], rest[0])),
        Chunk(0, "", (), call_parts=(parts[1],)),
        Chunk(0, "", (), FinishReason.STOP, calls, (rest[1],)),
    ]
    app = build_http(scripted_service(ScriptedBackend(script)))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as http:
        client = anthropic.AsyncAnthropic(base_url="http://turnout", api_key="none", http_client=http)
        thinking = {"type": "enabled", "budget_tokens": 1024}
        whole = await client.messages.create(**ASKED, thinking=thinking)
        async with client.messages.stream(**ASKED, thinking=thinking) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        turns = [USER, {"role": "assistant", "content": final.content}]
        turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]})
        again = await client.messages.create(**ASKED | {"messages": turns}, thinking=thinking)
    assert said(final) == said(whole) == said(again)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == "Red, or blue?"
    assert whole.content[0].signature
    assert [(block.id, block.input) for block in whole.content[2:]] == [
        ("toolu_1", {"colour": "red"}),
        ("toolu_2", {"colour": "blue"}),
    ]
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
