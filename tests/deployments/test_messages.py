"""Anthropic's Messages API: bodies become chats, answers become messages, and a stream says what the whole one does."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.messages.parser import count_call, messages_job, relaxed
from tests.properties import cases
from turnout.calls import GenerateCall
from turnout.errors import Code, TurnoutError
from turnout.tools import ToolCall

USER = {"role": "user", "content": "Weather in Bern?"}
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 64, "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "description": "of a city", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
]
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich"}}
CALLED = {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USE]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


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
    names = {"type": "object", "propertyNames": text_only, "properties": {"not": text_only, "propertyNames": {}}}
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


NOT = {"not": {"const": 1}}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"propertyNames": {"pattern": "a"}}, None),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, {"patternProperties": {"b": {}}}),
        ({"propertyNames": {"enum": 1}}, {}),
        ({"propertyNames": {"minLength": "1"}}, {}),
        (
            {"properties": {"a": NOT}, "unevaluatedProperties": False},
            {"properties": {"a": {}}, "unevaluatedProperties": False},
        ),
        ({"$ref": "#/$defs/a", "unevaluatedProperties": False}, {"$ref": "#/$defs/a"}),
        ({"allOf": 1, "unevaluatedItems": False}, {"allOf": 1}),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedItems": False},
            {"$schema": "http://json-schema.org/draft-07/schema#"},
        ),
        ({"dependentRequired": {"a": ["b"]}}, None),
        ({"dependentRequired": {"a": "b"}}, {}),
        (
            {"dependencies": {"a": ["b"], "b": {"properties": {"c": NOT}}}},
            {"dependencies": {"a": ["b"], "b": {"properties": {"c": {}}}}},
        ),
        ({"contains": {}, "minContains": 0}, None),
        ({"contains": {}, "minContains": 1, "uniqueItems": True}, {}),
        ({"uniqueItems": False, "not": False, "if": True}, None),
        ({"items": [NOT, True]}, {"items": [{}, True]}),
    ],
)
def test_keywords_of_tools_that_are_followed_stay(schema: dict[str, Any], kept: dict[str, Any] | None) -> None:
    assert relaxed(schema) == (schema if kept is None else kept)
    assert relaxed({"properties": {"a": {"anyOf": [True, {"$schema": 1, **schema}]}}})


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
        assert (structure.kind, json.loads(structure.value)) == ("json_schema", SCHEMA)


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
