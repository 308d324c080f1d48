"""Requests to endpoints: streams, failures, breakers and their configuration, against scripted servers."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.endpoints.breaker import Breaker
from pool.endpoints.sse import EventReader
from tests.pool.endpoints.scripted import (
    Server,
    answer,
    ask,
    event,
    refusal,
    refused,
    stream,
    text_of,
    usage_event,
    words,
)
from turnout.calls import ChatMessage, Chunk, Delivered, ScoreCall
from turnout.chat_template import TemplateOptions
from turnout.config import parse_config
from turnout.errors import Code, TurnoutError
from turnout.tools import Tool, ToolCall, ToolCallPart
from turnout.types import FinishReason

WHOLE = "Grüße, 世界! 👋"


# What comes


@given(st.data())
def test_events_do_not_depend_on_where_the_bytes_are_cut(data):
    ends = data.draw(st.lists(st.sampled_from(["\n", "\r", "\r\n"]), min_size=1, max_size=3))
    sent, expected = "\ufeff", []
    for text in data.draw(st.lists(st.sampled_from([WHOLE, "a: b", "", " x", "[DONE]"]), max_size=4)):
        end = ends[len(expected) % len(ends)]
        sent += f": keep-alive{end}event: message{end}data: {text}{end}id: 1{end}data:{text}{end}{end}"
        expected.append(f"{text}\n{text.removeprefix(' ')}")
    raw = sent.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    reader, found = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += reader.feed(raw[start:end])
    assert found + list(reader.end()) == expected


async def test_a_stream_is_passed_on_as_it_comes_with_its_usage(site):
    large = await site.server(words("Hel", "lo", usage=(12, 2, 4)))
    pool = site.pool(None, large)
    chunks, usage = await answer(pool, ask(sampling={"temperature": 0.0, "max_tokens": 9, "stop": ("x",)}))
    assert [chunk.text for chunk in chunks] == ["Hel", "lo", ""]
    assert [token.source for chunk in chunks for token in chunk.tokens] == ["big", "big"]
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (12, 2, 4)
    assert usage.sampling == {"temperature": 0.0, "max_tokens": 9}
    [body] = large.bodies
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.0,
        "max_completion_tokens": 9,
        "stop": ["x"],
        "seed": 1,
    }


async def test_bytes_cut_anywhere_comments_and_crlf_make_the_same_text(site):
    raw = b": ping\r\n\r\n" + event({"content": WHOLE}).replace(b"\n", b"\r\n") + event({}, "length") + b"data: [DONE]"
    raw = raw.replace(json.dumps(WHOLE).encode(), json.dumps(WHOLE, ensure_ascii=False).encode())
    large = await site.server(stream(*(raw[place : place + 1] for place in range(len(raw)))))
    chunks, usage = await answer(site.pool(None, large), ask())
    assert text_of(chunks) == WHOLE
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert "reports no usage" in usage.notes[0]


async def test_a_server_that_does_not_stream_is_read_as_well(site):
    async def script(request, body):
        from aiohttp import web

        message = {"role": "assistant", "content": WHOLE, "reasoning": "hm"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})

    chunks, usage = await answer(site.pool(None, await site.server(script)), ask())
    assert [(chunk.text, chunk.reasoning, chunk.finish_reason) for chunk in chunks] == [(WHOLE, "hm", "stop")]
    assert usage.completion_tokens == 5


async def test_thinking_and_calls_of_tools_are_read_part_by_part(site):
    def called(**function: str) -> dict[str, Any]:
        return {"index": 0, "function": function}

    large = await site.server(
        stream(
            event({"reasoning_content": "let me "}),
            event({"reasoning": "see"}),
            event({"tool_calls": [{**called(name="f", arguments=""), "id": "c1"}]}),
            event({"tool_calls": [called(arguments='{"a":')]}),
            event({"tool_calls": [called(arguments=" 1}")]}),
            event({"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]}),
            event({}, "tool_calls"),
            usage_event(3, 7),
            b"data: [DONE]\n\n",
        )
    )
    tools = (Tool("f", "", '{"type": "object"}'), Tool("g"))
    chunks, _ = await answer(site.pool(None, large), ask(tools=tools, tool_choice="f"))
    assert "".join(chunk.reasoning for chunk in chunks) == "let me see"
    assert [part for chunk in chunks for part in chunk.call_parts] == [
        ToolCallPart(0, "c1", "f", ""),
        ToolCallPart(0, arguments='{"a":'),
        ToolCallPart(0, arguments=" 1}"),
        ToolCallPart(1, "c2", "g", "{}"),
    ]
    assert chunks[-1].tool_calls == (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}"))
    assert large.bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert [tool["function"]["name"] for tool in large.bodies[0]["tools"]] == ["f", "g"]


async def test_log_probabilities_keep_bytes_and_alternatives(site):
    halves = "é".encode()
    content = [
        {"token": "\\xc3", "bytes": [halves[0]], "logprob": -0.1, "top_logprobs": []},
        {
            "token": "\\xa9",
            "bytes": [halves[1]],
            "logprob": -0.2,
            "top_logprobs": [{"token": "z", "logprob": -0.1}, {"token": "\\xa9", "logprob": -0.2}],
        },
    ]
    large = await site.server(
        stream(event({"content": "é"}, "stop", logprobs={"content": content}), b"data: [DONE]\n\n")
    )
    chunks, _ = await answer(site.pool(None, large), ask(sampling={"logprobs": 2}))
    tokens = chunks[0].tokens
    assert b"".join(token.data for token in tokens) == halves
    assert [token.text for token in tokens] == ["", "é"]
    assert tokens[1].top == ((1, "z", -0.1), (0, "é", -0.2))
    assert large.bodies[0]["logprobs"] is True
    assert large.bodies[0]["top_logprobs"] == 2


# What is refused


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"top_k": 5}, "top_k"),
        ({"structure": {"kind": "regex", "value": "a+"}}, "structure"),
    ],
)
async def test_what_a_dialect_does_not_know_is_refused_by_name(site, sampling, field):
    large = await site.server(words("x"))
    error = await refused(site.pool(None, large), ask(sampling=sampling))
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, field)
    assert "dialect openai" in error.message
    chunks, _ = await answer(site.pool(None, large, dialect="vllm"), ask(sampling=sampling))
    assert text_of(chunks) == "x"


async def test_methods_that_need_tokens_are_refused_by_name(site):
    small, large = await site.server(words("x")), await site.server(words("x"))
    pool = site.pool(small, large)
    error = await refused(pool, ask(method="speculative"))
    assert error.field == "method"
    assert "needs the tokens of its models, and 'little' (small) is an endpoint" in error.message
    assert "best_of, cascade, plain, random" in error.message
    assert (await refused(pool, ask(messages=None, prompt=(1, 2)))).field == "prompt"
    with pytest.raises(TurnoutError, match="is an endpoint"):
        await pool.score(ScoreCall("r", "p", "a", ("b",)))
    with pytest.raises(TurnoutError, match="is an endpoint"):
        await pool.tokens(ask())
    assert not small.bodies
    assert not large.bodies


async def test_an_answer_that_had_begun_elsewhere_is_not_made_again(site):
    pool = site.pool(None, await site.server(words("x")))
    error = await refused(pool, ask(delivered=(Delivered((0,), 3),)))
    assert error.code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("script", "code", "says", "tries"),
    [
        (refusal(400, {"message": "too hot", "param": "temperature"}), Code.INVALID_ARGUMENT, "too hot", 1),
        (refusal(422, {"message": "too hot"}), Code.INVALID_ARGUMENT, "too hot", 1),
        (refusal(401, {"message": "bad key sekret"}), Code.UNAVAILABLE, "key_file", 1),
        (refusal(404, {"message": "no such model"}), Code.UNAVAILABLE, "url, model", 1),
        (refusal(302, "moved", Location="http://127.0.0.1:1/"), Code.UNAVAILABLE, "HTTP 302", 1),
        (refusal(429, {"message": "slow down"}, Retry_After="0.5"), Code.RESOURCE_EXHAUSTED, "slow down", 3),
        (refusal(429, {"message": "slow down"}, Retry_After="60"), Code.RESOURCE_EXHAUSTED, "60.0 s", 1),
        (refusal(502), Code.UNAVAILABLE, "HTTP 502", 3),
        (refusal(500, {"message": "for sekret"}), Code.UNAVAILABLE, "for ***", 3),
        (stream(b"data: {"), Code.UNAVAILABLE, "no JSON", 3),
        (stream(b"data: 7\n\n"), Code.UNAVAILABLE, "no answer of OpenAI's API", 3),
        (stream(event({"role": "assistant"})), Code.UNAVAILABLE, "ended before it was whole", 3),
        (stream(event({"role": "assistant"}), dies=True), Code.UNAVAILABLE, "before", 3),
        (stream(b'data: {"error": {"message": "oom", "code": 500}}\n\n'), Code.UNAVAILABLE, "oom", 3),
    ],
)
async def test_failures_before_an_answer(site, tmp_path, script, code, says, tries):
    key = tmp_path / "key"
    key.write_text("sekret\n")
    large = await site.server(script)
    pool = site.pool(None, large, key_file=str(key))
    error = await refused(pool, ask())
    assert error.code is code
    assert says in error.message
    assert "'big'" in error.message
    assert "sekret" not in error.message
    assert large.headers[0]["Authorization"] == "Bearer sekret"
    assert len(large.bodies) == tries
    if "param" in str(script.__closure__ and [cell.cell_contents for cell in script.__closure__]):
        assert error.field == "temperature"


async def test_a_retry_that_succeeds_leaves_no_trace_in_the_answer(site):
    large = await site.server(refusal(503), stream(event({"role": "assistant"}), dies=True), words("ok"))
    pool = site.pool(None, large)
    chunks, _ = await answer(pool, ask())
    assert text_of(chunks) == "ok"
    [stats] = pool.stats().endpoints
    assert (stats.retries, stats.requests, stats.breaker) == (2, {"failed": 2, "ok": 1}, "closed")


async def test_a_stream_that_dies_ends_in_an_error_that_says_so(site):
    large = await site.server(stream(event({"content": "Hel"}), dies=True))
    pool = site.pool(None, large)
    events = pool.generate(ask())
    assert (await anext(events)).text == "Hel"
    with pytest.raises(TurnoutError, match="broke off") as caught:
        await anext(events)
    assert caught.value.code is Code.UNAVAILABLE
    assert len(large.bodies) == 1


async def test_a_server_that_cannot_be_reached(site):
    gone = Server()
    gone.url = "http://127.0.0.1:9/v1"
    error = await refused(site.pool(None, gone), ask())
    assert error.code is Code.UNAVAILABLE
    assert "cannot be reached" in error.message
    assert "127.0.0.1" not in error.message


async def test_silence_and_the_deadline(site):
    large = await site.server(stream(event({"content": "a"}), holds=True))
    error = await refused(site.pool(None, large, timeout_s=1.0), ask())
    assert "nothing came for 1 s; the answer broke off" in error.message
    await asyncio.wait_for(large.closed.wait(), 60)
    pool = site.pool(None, large)
    error = await refused(pool, ask(deadline_s=0.05))
    assert (error.code, error.field) == (Code.DEADLINE_EXCEEDED, "deadline_s")
    assert pool.stats().endpoints[0].running == 0


async def test_leaving_an_answer_closes_the_connection(site):
    large = await site.server(stream(event({"content": "a"}), holds=True))
    pool = site.pool(None, large)
    async with aclosing(pool.generate(ask())) as events:
        assert (await anext(events)).text == "a"
    await asyncio.wait_for(large.closed.wait(), 10)
    [stats] = pool.stats().endpoints
    assert (stats.running, stats.requests) == (0, {"cancelled": 1})
    assert pool.stats().requests == 0


async def test_no_more_requests_are_there_than_it_may_have(site):
    large = await site.server(words("a"))
    pool = site.pool(None, large, max_concurrency=2)
    await asyncio.gather(*(answer(pool, ask(tenant=f"t{place % 3}")) for place in range(9)))
    assert large.most_running <= 2
    assert len(large.bodies) == 9


# Breaker


def test_a_breaker_opens_lets_one_try_and_closes():
    now = 0.0
    breaker = Breaker("big", 2, 10.0, lambda: now)

    def attempt(succeeds: bool | None) -> None:
        with breaker.attempt() as tried:
            if succeeds is not None:
                tried.succeeded() if succeeds else tried.failed()

    attempt(False), attempt(True), attempt(False)
    assert breaker.state == "closed"
    attempt(False)
    assert (breaker.state, breaker.opened) == ("open", 1)
    with pytest.raises(TurnoutError, match="try again in 10 s") as caught:
        breaker.check()
    assert (caught.value.code, caught.value.retry_after_s) == (Code.UNAVAILABLE, 10.0)
    now = 10.0
    assert breaker.state == "half_open"
    with breaker.attempt(), pytest.raises(TurnoutError):
        breaker.check()
    attempt(None)  # was cancelled: the next one may try
    attempt(False)
    assert breaker.state == "open"
    now = 20.0
    attempt(True)
    assert breaker.state == "closed"


async def test_an_open_breaker_is_not_asked_and_makes_the_pool_degraded(site):
    from deployments.health import health_of

    large = await site.server(refusal(500))
    pool = site.pool(None, large, retries=0, breaker_failures=2, breaker_open_s=1000)
    for _ in range(3):
        await refused(pool, ask())
    assert len(large.bodies) == 2
    pool.check()
    report = health_of({"p": [pool.stats()]})
    assert report.status == "degraded"
    assert "1 endpoint" in report.endpoints


# Configuration


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"models": {"big": {}}}, "models.big.path"),
        ({"models": {"big": {"path": "x", "endpoint": {"url": "http://h/v1", "model": "m"}}}}, "models.big.path"),
        ({"models": {"big": {"dtype": "float32", "endpoint": {"url": "http://h", "model": "m"}}}}, "models.big.dtype"),
        ({"models": {"big": {"endpoint": {"url": "http://u:p@h/v1", "model": "m"}}}}, "models.big.endpoint.url"),
        (
            {"models": {"big": {"endpoint": {"url": "http://h", "model": "m", "headers": {"Authorization": "x"}}}}},
            "models.big.endpoint.headers.Authorization",
        ),
        ({"pools": {"p": {"large": "big", "placement": {"models": "actors"}}}}, "pools.p.placement.models"),
        ({"pools": {"p": {"large": "big", "failover": {"roles": ["judge"]}}}}, "pools.p.failover.roles"),
    ],
)
def test_faults_of_the_configuration_are_named(change, field):
    values = {
        "models": {"big": {"endpoint": {"url": "http://h:1/v1", "model": "m"}}},
        "pools": {"p": {"large": "big"}},
        **change,
    }
    with pytest.raises(TurnoutError) as caught:
        parse_config(values)
    assert caught.value.field == field


def test_a_key_that_cannot_be_read_is_refused_and_one_that_changes_is_read_again(tmp_path):
    from pool.endpoints.client import Key

    path = tmp_path / "key"
    with pytest.raises(TurnoutError, match=r"models\.big\.endpoint\.key_file"):
        Key(str(path), "models.big.endpoint.key_file")
    path.write_text("one")
    key = Key(str(path), "f")
    assert key.value() == "one"
    path.write_text("second")
    assert key.value() == "second"
    path.unlink()
    assert key.value() == "second"


async def test_options_of_the_template_are_passed_on(site):
    large = await site.server(words("x"))
    pool = site.pool(None, large, {"chat_template_kwargs": {"a": 1}}, dialect="vllm")
    template = TemplateOptions({"b": 2}, "low", continue_final_message=True)
    turns = (ChatMessage("user", "q"), ChatMessage("assistant", "so"))
    await answer(pool, ask(messages=turns, template=template))
    [body] = large.bodies
    assert body["chat_template_kwargs"] == {"a": 1, "b": 2}
    assert (body["reasoning_effort"], body["continue_final_message"]) == ("low", True)


async def test_chunks_that_travel_together_keep_their_calls():
    from deployments.backend import merge

    parts = [
        Chunk(0, "", (), call_parts=(ToolCallPart(0, "c", "f", ""),)),
        Chunk(0, "", (), FinishReason.STOP, (ToolCall("c", "f", "{}"),)),
    ]
    [made] = merge(parts)
    assert made.call_parts == parts[0].call_parts
    assert made.tool_calls == parts[1].tool_calls
