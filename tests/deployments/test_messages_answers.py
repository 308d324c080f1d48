"""Answers of Anthropic's Messages API: messages, and streams that say what the whole ones do."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http import build_http
from deployments.messages.writer import MessageEvents, Options, message_object
from deployments.surface import Head
from tests.deployments.scripted_answers import (
    CACHED_TOKENS,
    PROMPT_TOKENS,
    WRITTEN_TOKENS,
    ScriptedBackend,
    scripted_service,
)
from tests.deployments.test_messages import BODY, TOOLS, USER, call_of
from turnout.calls import Begun, Chunk, GenerateCall
from turnout.errors import Code, TurnoutError, out_of_range
from turnout.tools import ToolCall, ToolCallPart
from turnout.types import FinishReason, SamplingParams

HEAD = Head("msg_1", 0, "demo")


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events tell of, put together as a client does."""
    message: dict[str, Any] = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = deepcopy(event["message"])
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(deepcopy(event["content_block"]) | {"open": True, "json": ""})
        elif kind == "content_block_delta":
            held, delta = message["content"][event["index"]], event["delta"]
            assert held["open"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
                delta["type"], "json"
            )
            held[name] += delta["partial_json" if name == "json" else name]
        elif kind == "content_block_stop":
            held = message["content"][event["index"]]
            assert held.pop("open")
            arguments = held.pop("json")
            if held["type"] == "tool_use":
                held["input"] = json.loads(arguments or "{}")
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def streamed(chunks: list[Chunk], options: Options, call: GenerateCall) -> list[dict[str, Any]]:
    writer = MessageEvents(HEAD, options)
    batches = [(Begun(PROMPT_TOKENS),), *((chunk,) for chunk in chunks), (ScriptedBackend([]).usage(call),)]
    return [dict(event) for batch in batches for event in writer.of_batch(batch)]


def whole(chunks: list[Chunk], options: Options, call: GenerateCall) -> dict[str, Any]:
    last = chunks[-1]
    joined = Chunk(
        0,
        "".join(chunk.text for chunk in chunks),
        (),
        last.finish_reason,
        last.tool_calls,
        reasoning="".join(chunk.reasoning for chunk in chunks),
        stop=last.stop,
    )
    return dict(message_object(HEAD, options, joined, ScriptedBackend([]).usage(call)))


CALLS = (ToolCall("call_a", "weather", '{"city": "Zürich"}'), ToolCall("call_b", "now", "{}"))
TEXTS = st.lists(st.text("ab €\n", max_size=3), max_size=4)


def chunks_of(reasoning: list[str], texts: list[str], calls: tuple[ToolCall, ...], **last: Any) -> list[Chunk]:
    made = [Chunk(0, "", (), reasoning=part) for part in reasoning] + [Chunk(0, part, ()) for part in texts]
    for index, call in enumerate(calls):
        half = len(call.arguments) // 2
        parts = (ToolCallPart(index, call.id, call.name), ToolCallPart(index, arguments=call.arguments[:half]))
        made += [Chunk(0, "", (), call_parts=parts)]
        made += [Chunk(0, "", (), call_parts=(ToolCallPart(index, arguments=call.arguments[half:]),))]
    return [*made, Chunk(0, "", (), **{"finish_reason": FinishReason.STOP, "tool_calls": calls, **last})]


@given(TEXTS, TEXTS, st.integers(0, 2), st.booleans(), st.sampled_from([None, "END", 5]))
def test_a_stream_tells_what_the_whole_answer_is(
    reasoning: list[str], texts: list[str], num_calls: int, shows: bool, stop: Any
) -> None:
    chunks, call = chunks_of(reasoning, texts, CALLS[:num_calls], stop=stop), call_of(seed=1)
    options = Options(None, shows, False, 64)
    events = streamed(chunks, options, call)
    expected = whole(chunks, options, call)
    assert assembled(events) == expected
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == PROMPT_TOKENS
    said = {each["type"]: each for each in expected["content"]}
    assert said.get("text", {"text": ""})["text"] == "".join(texts)
    assert said.get("thinking", {"thinking": ""})["thinking"] == ("".join(reasoning) if shows else "")


@pytest.mark.parametrize(
    ("last", "max_tokens", "reason", "sequence"),
    [
        ({}, 64, "end_turn", None),
        ({"stop": "END"}, 64, "stop_sequence", "END"),
        ({"stop": 3}, 64, "end_turn", None),
        ({"finish_reason": FinishReason.LENGTH}, WRITTEN_TOKENS, "max_tokens", None),
        ({"finish_reason": FinishReason.LENGTH}, 64, "model_context_window_exceeded", None),
        ({"tool_calls": CALLS, "stop": "END"}, 64, "tool_use", None),
        ({"tool_calls": CALLS, "finish_reason": FinishReason.LENGTH}, WRITTEN_TOKENS, "max_tokens", None),
    ],
)
def test_why_an_answer_ended(last: dict[str, Any], max_tokens: int, reason: str, sequence: str | None) -> None:
    made = whole(chunks_of([], ["x"], (), **last), Options(None, True, False, max_tokens), call_of(seed=1))
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, sequence)
    usage = made["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == PROMPT_TOKENS
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (CACHED_TOKENS, WRITTEN_TOKENS)
    assert usage["turnout"]["method"] == "plain"


def client_of(backend: ScriptedBackend) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=build_http(scripted_service(backend)))
    return httpx.AsyncClient(transport=transport, base_url="http://turnout")


def events_in(body: str) -> list[dict[str, Any]]:
    events = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_over_http_whole_and_streamed() -> None:
    backend = ScriptedBackend([Chunk(0, "", (), reasoning="Hm."), Chunk(0, "Hi", (), FinishReason.STOP, stop="END")])
    async with client_of(backend) as http:
        answer = await http.post("/v1/messages?beta=true", json=BODY | {"seed": 1})
        told = await http.post("/v1/messages", json=BODY | {"seed": 1, "stream": True})
    made, heard = answer.json(), assembled(events_in(told.text))
    assert [each["type"] for each in made["content"]] == ["thinking", "text"]
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "END")
    assert answer.headers["request-id"] == made["id"] == backend.calls[0].request_id
    assert told.headers["request-id"] == heard["id"] != made["id"]
    assert heard | {"id": made["id"]} == made


async def test_errors_have_their_shape_before_and_within_a_stream() -> None:
    fault = TurnoutError(Code.UNAVAILABLE, "pool 'demo' has gone", retry_after_s=2.0)
    for said in ([], [Chunk(0, "Hi", ())]):
        async with client_of(ScriptedBackend([*said, fault])) as http:
            answer = await http.post("/v1/messages", json=BODY | {"stream": True})
        error = {"type": "overloaded_error", "message": "pool 'demo' has gone"}
        if not said:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert answer.json().items() >= {"type": "error", "error": error}.items()
            assert answer.json()["request_id"].startswith("msg_")
        else:
            *events, last = events_in(answer.text)
            assert last == {"type": "error", "error": error, "request_id": answer.headers["request-id"]}
            assert assembled(events)["content"] == [{"type": "text", "text": "Hi", "open": True, "json": ""}]


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_look_for() -> None:
    fault = out_of_range("messages", "9 tokens; at most 7 fit the context of 8")
    async with client_of(ScriptedBackend([fault])) as http:
        answer = await http.post("/v1/messages", json=BODY | {"stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: messages: 9 tokens; at most 7 fit the context of 8",
    }


async def test_tokens_are_counted_as_they_would_be_read() -> None:
    backend = ScriptedBackend([Chunk(0, "x", (), FinishReason.STOP)])
    asked = {"system": "S", "messages": [USER], "tools": TOOLS, "thinking": {"type": "disabled"}}
    async with client_of(backend) as http:
        counted = await http.post("/v1/messages/count_tokens", json={"model": "demo", **asked})
        await http.post("/v1/messages", json=BODY | asked)
        refused = await http.post("/v1/messages/count_tokens", json={"model": "none", **asked})
    assert counted.json() == {"input_tokens": len("<system>S<user>Weather in Bern?")}
    count, answered = backend.calls
    assert (count.messages, count.tools, count.template) == (answered.messages, answered.tools, answered.template)
    assert count.sampling.max_tokens == SamplingParams().max_tokens
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
