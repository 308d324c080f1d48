"""Anthropic's Messages API: bodies become chats, answers become messages, and a stream says what the whole one does."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http import build_http
from deployments.messages.parser import count_call, messages_job, relaxed
from deployments.messages.writer import MessageEvents, Options, message_object
from deployments.surface import Head
from tests.deployments.scripted_answers import (
    CACHED_TOKENS,
    PROMPT_TOKENS,
    WRITTEN_TOKENS,
    ScriptedBackend,
    scripted_service,
)
from tests.properties import cases
from turnout.calls import Begun, Chunk, GenerateCall
from turnout.errors import Code, TurnoutError
from turnout.tools import ToolCall, ToolCallPart
from turnout.types import FinishReason, SamplingParams

USER = {"role": "user", "content": "Weather in Bern?"}
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 64, "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "description": "of a city", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
]
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}}
CALLED = {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USE]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
HEAD = Head("msg_1", 0, "demo")


def call_of(**changes: Any) -> GenerateCall:
    [call] = messages_job({**BODY, **changes}).calls
    return call


def turns_of(*messages: dict[str, Any], **changes: Any) -> list[tuple[str, str]]:
    turns = call_of(messages=list(messages), **changes).messages
    assert turns is not None
    return [(turn.role, turn.content) for turn in turns]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_a_body_with_everything_becomes_a_call() -> None:
    job = messages_job(
        {
            **BODY,
            "system": [text("x-anthropic-billing-header: v=1;"), text("Be brief."), text("Be right.")],
            "stop_sequences": ["END", "\n\n"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "seed": 3,
            "stream": True,
            "tools": TOOLS,
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "decoding": {"method": "plain", "session": "s"},
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "betas": ["x"],
            "context_management": {"edits": []},
        }
    )
    [call] = job.calls
    assert (call.model, call.method, call.session, job.stream, call.include_prompt_len) == (
        "demo",
        "plain",
        "s",
        True,
        True,
    )
    used = call.sampling
    assert (used.max_tokens, used.temperature, used.top_p, used.top_k, used.seed) == (64, 0.5, 0.9, 5, 3)
    assert used.stop == ("END", "\n\n")
    assert used.structure is not None
    assert [(tool.name, tool.description, json.loads(tool.parameters)) for tool in call.tools] == [
        ("weather", "of a city", SCHEMA)
    ]
    assert [(turn.role, turn.content) for turn in call.messages or ()] == [
        ("system", "Be brief.\nBe right."),
        ("user", "Weather in Bern?"),
    ]


def test_keywords_of_tools_that_cannot_be_followed_are_shown_and_not_followed() -> None:
    text_only = {"type": "string", "format": "cron"}
    names = {"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"not": text_only, "propertyNames": {}}}
    schema = {"type": "object", "properties": {"a": names, "b": {"anyOf": [{"not": {}}, {"items": text_only}]}}}
    call = call_of(tools=[{"name": "f", "input_schema": schema}])
    assert json.loads(call.tools[0].parameters) == schema
    assert relaxed(schema) == {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"not": {"type": "string"}, "propertyNames": {}}},
            "b": {"anyOf": [{}, {"items": {"type": "string"}}]},
        },
    }
    with pytest.raises(TurnoutError, match=r"tools\.0\.input_schema\.properties\.b\..*format"):
        call_of(tools=[{"name": "f", "input_schema": schema, "strict": True}])


def test_calls_and_their_results_come_back() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    said = {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, *CALLED["content"]]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("no"), text("city")], "is_error": True}
    answer = {"role": "user", "content": [text("Here."), RESULT, failed, text("And now?")]}
    turns = call_of(messages=[USER, said, answer], tools=TOOLS).messages or ()
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in turns] == [
        ("user", "Weather in Bern?", ""),
        ("assistant", "Let me see.", ""),
        ("tool", "rain", "toolu_1"),
        ("tool", "Error: no\ncity", "toolu_2"),
        ("user", "Here.\nAnd now?", ""),
    ]
    assert turns[1].tool_calls == (ToolCall("toolu_1", "weather", '{"city": "Zürich"}'),)


def test_turns_of_one_role_are_one_turn() -> None:
    more = {"role": "user", "content": [text("And in Oslo?"), text("")]}
    parts = {"role": "assistant", "content": [text("Ra"), text("in")]}
    assert turns_of(USER, more, parts, parts, USER, system="S") == [
        ("system", "S"),
        ("user", "Weather in Bern?\nAnd in Oslo?\n"),
        ("assistant", "RainRain"),
        ("user", "Weather in Bern?"),
    ]


def test_what_the_system_says_later_is_said_where_every_template_takes_it() -> None:
    system = {"role": "system", "content": [text("T")]}
    said = {"role": "assistant", "content": "Rain."}
    assert turns_of(USER, system, said, system, USER, system="S") == [
        ("system", "S\nT"),
        ("user", "Weather in Bern?"),
        ("assistant", "Rain."),
        ("user", "<system>\nT\n</system>\nWeather in Bern?"),
    ]
    assert turns_of(USER, system)[0] == ("system", "T")


def test_an_answer_that_has_begun_is_continued() -> None:
    begun = call_of(messages=[USER, {"role": "assistant", "content": "It is"}])
    assert begun.template.continue_final_message
    empty = call_of(messages=[USER, {"role": "assistant", "content": []}])
    assert (len(empty.messages or ()), empty.template.continue_final_message) == (1, False)


@pytest.mark.parametrize(
    ("asked", "effort"),
    [
        ({}, ""),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "medium"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}}, "xhigh"),
        ({"output_config": {"effort": "low"}}, "low"),
    ],
)
def test_thinking_is_an_effort(asked: dict[str, Any], effort: str) -> None:
    assert call_of(**asked).template.effort == effort
    assert count_call({"messages": [USER], **asked}).template.effort == effort


def test_a_schema_of_the_output_is_a_structure() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for asked in ({"output_config": {"format": form}}, {"output_format": form}):
        structure = call_of(**asked).sampling.structure
        assert structure is not None
        assert (structure.kind, structure.schema_value) == ("json_schema", SCHEMA)


def block(kind: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, **more}]}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_tokens": None}, "max_tokens: is needed"),
        ({"inference_geo": "us"}, "inference_geo: unknown"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
        (block("image", source={}), "messages.0.content.0.type: 'image' is not supported here"),
        (block("document"), "messages.0.content.0.type: 'document' is not supported here"),
        (block("tool_use", id="a", name="f", input={}), "messages.0.content.0.type: 'tool_use' is not"),
        (block("text"), "messages.0.content.0.text: "),
        (block("tool_result", content="x"), "messages.0.content.0.tool_use_id: "),
        (block("tool_result", tool_use_id="a", content=[{"type": "image"}]), "messages.0.content.0.content.0.type: "),
        ({"system": [{"type": "image"}]}, "system.0.type: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: 'web_search_20250305' is"),
        ({"tools": [{"name": "a b", "input_schema": SCHEMA}]}, "tools.0.name: "),
        ({"tools": [TOOLS[0], {"name": "f", "input_schema": {"type": "array"}}]}, "tools.1.input_schema.type: "),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name: must be one of weather"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: belongs to type tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"stop_sequences": ["x" * 300]}, "stop_sequences.0: "),
        ({"temperature": 3}, "temperature: "),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"x-guidance": 1}}}}, "output_config.format"),
        ({"messages": [USER, CALLED]}, "messages.1: ends in a tool_use block"),
        ({"messages": [USER, {**CALLED, "content": [text("x"), {**USE, "name": "a b"}]}, USER]},
         "messages.1.content.1.name: "),
        ({"decoding": {"structure": {"regex": 5}}}, "decoding.structure"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_as_the_caller_named_it(changes: dict[str, Any], message: str) -> None:
    body = {name: value for name, value in {**BODY, "system": "S", **changes}.items() if value is not None}
    with pytest.raises(TurnoutError) as refused:
        messages_job(body)
    assert refused.value.message.startswith(message)
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_later_refusals_are_named_as_the_caller_named_them() -> None:
    names = messages_job({**BODY, "tools": TOOLS, "system": "S", "decoding": {"method": "plain"}}).spelling
    expected = {"method": "decoding.method", "stop": "stop_sequences", "messages.1": "messages.0", "structure": "tools"}
    assert expected.items() <= dict(names).items()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "text", "tool_use", "assistant", "any"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
    max_leaves=4,
)
RICH = {
    **BODY,
    "messages": [USER, CALLED, {"role": "user", "content": [RESULT]}],
    "system": [text("S")],
    "tools": TOOLS,
    "tool_choice": {"type": "tool", "name": "weather"},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
}


def places(value: Any) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *path) for key, each in inside for path in places(each))]


@cases(150)
@given(st.sampled_from(places(RICH)[1:]), VALUES)
def test_a_body_with_a_wrong_value_anywhere_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    body = deepcopy(RICH)
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        assert len(messages_job(body).calls) == 1
    except TurnoutError as error:
        assert error.code is Code.INVALID_ARGUMENT
        assert error.field


# Answers


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
    options = Options(False, shows, False, 64)
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
    ],
)
def test_why_an_answer_ended(last: dict[str, Any], max_tokens: int, reason: str, sequence: str | None) -> None:
    made = whole(chunks_of([], ["x"], (), **last), Options(False, True, False, max_tokens), call_of(seed=1))
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
