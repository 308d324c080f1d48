"""Tools over gRPC: what HTTP's bodies ask for is asked for alike, refused alike, and answered alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments import grpc_messages
from deployments.faults import respell
from deployments.schemas import chat_job
from tests.constrained import byte_compiler
from tests.deployments.access.kit import Served, house, served
from tests.deployments.fake_pool import TOOL_CALL, FakePool
from tests.deployments.test_metrics import values
from tests.deployments.test_tools import ENDLESS, TOOLS, USER, nested
from turnout import client_messages
from turnout.calls import ChatMessage, Chunk, GenerateCall, TokenOut
from turnout.client import Client
from turnout.errors import Code, TurnoutError, invalid
from turnout.proto import generation_pb2 as pb
from turnout.structure import Structure
from turnout.tool_formats.grammar import CallRules
from turnout.tools import Tool, ToolCall
from turnout.types import FinishReason, TokenKind

CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
TURNS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "warm", "tool_call_id": "c1"},
]


@pytest.mark.parametrize("choice", [None, "auto", "none", "required", "now"])
def test_a_message_asks_for_what_a_body_asks_for(choice: str | None) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    body = {"tool_choice": named if choice == "now" else choice} if choice else {}
    [wanted] = chat_job({"messages": TURNS, "tools": TOOLS, **body}).calls
    options: Any = {"tools": TOOLS, **({"tool_choice": choice} if choice else {})}
    call = grpc_messages.generate_call(client_messages.generate_request(None, TURNS, options))
    assert (call.messages, call.tools, call.sampling.structure) == (
        wanted.messages, wanted.tools, wanted.sampling.structure
    )  # fmt: skip
    assert [tool.name for tool in call.tools] == ["weather", "now"]
    # The same in the client's own types.
    tools = [Tool(each.name, each.description, each.parameters) for each in call.tools]
    assert call.messages is not None
    again = client_messages.generate_request(None, list(call.messages), {**options, "tools": tools})
    assert grpc_messages.generate_call(again).messages == wanted.messages
    assert grpc_messages.generate_call(again).sampling.structure == wanted.sampling.structure


def test_a_message_tells_the_template_what_a_body_tells_it() -> None:
    told: Any = {
        "chat_template_kwargs": {"enable_thinking": False, "documents": [{"title": "a"}]},
        "reasoning_effort": "low",
        "continue_final_message": True,
    }
    turns = [USER, {"role": "assistant", "content": "So"}]
    [wanted] = chat_job({"messages": turns, **told}).calls
    assert grpc_messages.generate_call(client_messages.generate_request(None, turns, told)).template == wanted.template
    assert (wanted.template.effort, wanted.template.begins_answer) == ("low", False)
    both = client_messages.generate_request(None, turns, {**told, "add_generation_prompt": True})
    with pytest.raises(TurnoutError) as refused:
        grpc_messages.generate_call(both)
    assert refused.value.field == "chat.add_generation_prompt"


def tool(**fields: str) -> pb.Tool:
    return pb.Tool(**{"name": "f", **fields})


def turn(role: str, content: str = "", **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content, **fields)


CALL = pb.ToolCall(name="f", arguments="{}")
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": pb.ToolChoice(mode="required")}, "chat.tool_choice", "needs tools"),
    ({"tools": [tool()], "tool_choice": pb.ToolChoice(mode="maybe")}, "chat.tool_choice.mode", "none, auto, required"),
    ({"tools": [tool()], "tool_choice": pb.ToolChoice(name="g")}, "chat.tool_choice.name", "must be one of f"),
    ({"tools": [tool(), tool()]}, "chat.tools", "same name"),
    ({"tools": [tool()] * 129}, "chat.tools", "at most 128"),
    ({"tools": [tool(name="a b")]}, "chat.tools.0.name", "match"),
    ({"tools": [tool(), tool(name="g", parameters="[")]}, "chat.tools.1.parameters", "JSON schema"),
    ({"tools": [tool(parameters="7")]}, "chat.tools.0.parameters", "JSON schema"),
    ({"tools": [tool(parameters='{"type": "array"}')]}, "chat.tools.0.parameters.type", "object"),
    (
        {"tools": [tool(parameters=repr(ENDLESS).replace("'", '"'))]},
        "chat.tools.0.parameters.properties.a.$ref",
        "no arguments fit",
    ),
    (
        {"tools": [tool(parameters='{"properties": {"function": {"not": {}}}}')]},
        "chat.tools.0.parameters.properties.function.not",
        "not supported",
    ),
    ({"tools": [tool(parameters=repr(nested(99)).replace("'", '"'))]}, "chat.tools.0.parameters", "levels"),
    ({"messages": [turn("tool", "x")]}, "chat.messages.0.tool_call_id", "needed"),
    ({"messages": [turn("user", "x", tool_call_id="c")]}, "chat.messages.0.tool_call_id", "role tool"),
    (
        {"messages": [turn("user", "x", tool_calls=[CALL])]},
        "chat.messages.0.tool_calls",
        "only allowed on messages with role `assistant`",
    ),
    (
        {"messages": [turn("assistant", tool_calls=[CALL, pb.ToolCall(name="f", arguments="[")])]},
        "chat.messages.0.tool_calls.1.arguments",
        "JSON object",
    ),
]


@pytest.mark.parametrize(("chat", "field", "said"), BAD)
def test_what_cannot_be_is_refused_by_the_messages_own_names(chat: dict[str, Any], field: str, said: str) -> None:
    request = pb.GenerateRequest(chat=pb.Chat(**{"messages": [turn("user", "x")], **chat}))
    with pytest.raises(TurnoutError, match=said) as refused:
        grpc_messages.generate_call(request)
    assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, field)
    assert refused.value.message.startswith(f"{field}: ")


def test_what_the_library_refuses_is_named_as_it_stands_in_the_message() -> None:
    bad = tool(name="g", parameters='{"properties": {"function": {"pattern": "("}}}')
    request = pb.GenerateRequest(chat=pb.Chat(messages=[turn("user", "x")], tools=[tool(), bad]))
    made = grpc_messages.generate_call(request).sampling.structure
    assert made is not None
    with pytest.raises(TurnoutError) as refused:
        byte_compiler().compile(made)
    named = respell(refused.value, grpc_messages.spelling(request))
    assert named.field == "chat.tools.1.parameters.properties.function.pattern"


def test_an_answer_calls_or_fits_the_structure() -> None:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[turn("user", "x")], tools=[tool()]), structure=pb.Structure(regex="a")
    )
    made = grpc_messages.generate_call(request).sampling.structure
    assert made is not None
    assert CallRules.of(made).answer == Structure(kind="regex", value="a")
    names = grpc_messages.spelling(request)
    assert (names["structure"], names["structure.answer"]) == ("chat.tools", "structure")
    request.chat.tool_choice.mode = "required"
    request.chat.tool_choice.allowed.append("f")
    request.chat.parallel_tool_calls = False
    made = grpc_messages.generate_call(request).sampling.structure
    assert made is not None
    rules = CallRules.of(made)
    assert (list(rules.functions), rules.required, rules.parallel) == (["f"], True, False)
    request.chat.tool_choice.Clear()
    request.chat.tool_choice.mode = "none"
    assert grpc_messages.generate_call(request).sampling.structure is not None
    assert grpc_messages.spelling(request)["structure"] == "structure"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("house")
    with house(folder, {"all": {}}, {"anonymous": "all"}) as made, served(made.service) as at:
        yield at


def test_calls_come_whole_and_streamed(server: Served) -> None:
    asked: Any = {"messages": [ChatMessage("user", "tool")], "model": "demo", "max_tokens": len(TOOL_CALL), "n": 2}
    with Client(server.address) as client:
        whole = client.generate(tools=TOOLS, **asked)
        [call] = whole.tool_calls
        assert (call.name, call.arguments, whole.text) == ("weather", '{"city": "Bern"}', "Let me see.\n")
        assert whole.choices[1].tool_calls[0].id not in ("", call.id)
        assert "".join(token.text for token in whole.tokens) == TOOL_CALL
        parts = [chunk for chunk in client.stream(tools=TOOLS, **asked) if chunk.index == 0]
        assert "".join(chunk.text for chunk in parts) == whole.text
        assert [(each.name, each.arguments) for chunk in parts for each in chunk.tool_calls] == [
            (call.name, call.arguments)
        ]
        new = [part for chunk in parts for part in chunk.call_parts]
        assert "".join(part.name for part in new) == call.name
        assert "".join(part.arguments for part in new) == call.arguments
        assert len(new) > 5
        assert (parts[-1].finish_reason, len(parts[-1].tool_calls)) == (FinishReason.STOP, 1)
        # Nobody looks for calls where none was offered, or none is to be made.
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            plain = client.generate(**asked, **options)
            assert (plain.text, plain.tool_calls) == (TOOL_CALL, ())
            assert plain.choices[0].finish_reason is FinishReason.LENGTH
        with pytest.raises(TurnoutError, match="tool_choice") as refused:
            client.generate(tools=TOOLS, tool_choice="nobody", **asked)
        assert refused.value.field == "chat.tool_choice.name"


def test_tokens_of_the_prompt_are_reported_where_they_are_asked_for(server: Served) -> None:
    with Client(server.address) as client:
        told = client.generate("xyz", model="demo", max_tokens=1, n=2, prompt_logprobs=1).prompt_tokens
        assert [(token.text, token.logprob, len(token.top)) for token in told] == [
            ("x", None, 0), ("y", -0.5, 1), ("z", -0.5, 1),
        ]  # fmt: skip
        assert [token.id for token in told] == list(b"xyz")
        one = client.generate((120,), model="demo", max_tokens=1, prompt_logprobs=0).prompt_tokens
        assert [(token.id, token.text) for token in one] == [(120, "x")]
        assert client.generate("xyz", model="demo", max_tokens=1).prompt_tokens == ()
        for top, stream in ((21, False), (-1, False), (1, True)):
            asked: Any = {"model": "demo", "max_tokens": 1, "prompt_logprobs": top}
            with pytest.raises(TurnoutError) as refused:
                list(client.stream("x", **asked)) if stream else client.generate("x", **asked)
            assert (refused.value.code, refused.value.field) == (Code.INVALID_ARGUMENT, "prompt_logprobs")


def test_a_prompt_that_cannot_be_told_is_a_refused_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(self: FakePool, call: GenerateCall) -> list[int]:
        raise invalid("model", "is an endpoint")

    monkeypatch.setattr(FakePool, "tokens", unknown)
    with (
        house(tmp_path, {"all": {}}, {"anonymous": "all"}) as own,
        served(own.service) as at,
        Client(at.address) as client,
    ):
        with pytest.raises(TurnoutError, match="is an endpoint"):
            client.generate("xyz", model="demo", max_tokens=1, prompt_logprobs=1)
        assert values(own.service.metrics)["turnout_refusals_total"] == {("INVALID_ARGUMENT", "model"): 1}


def test_a_call_says_that_it_is_why_the_answer_ended() -> None:
    chunk = Chunk(0, "", (), FinishReason.STOP, (ToolCall("c", "f", "{}"),))
    message = grpc_messages.chunk_message("r", "demo", (chunk,)).choices[0]
    assert message.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert client_messages.chunk(message) == chunk


def test_bytes_of_tokens_that_no_text_can_tell_arrive() -> None:
    """Two tokens of one character: their texts are alike, their bytes are it."""
    tops = ((5, "\ufffd", -0.1), (6, "\ufffd", -0.5), (7, "x", -0.9))
    tokens = tuple(
        TokenOut(id, "\ufffd", "large", TokenKind.DECODED, -0.1, top=tops, broken=((5, b"\xc3"), (6, b"\xa9")))
        for id in (5, 6)
    )
    got = client_messages.chunk(grpc_messages.chunk_message("r", "demo", (Chunk(0, "\u00e9", tokens),)).choices[0])
    assert b"".join(dict(token.broken)[token.id] for token in got.tokens).decode() == got.text
    assert [dict(token.broken) for token in got.tokens] == [{5: b"\xc3", 6: b"\xa9"}] * 2
