"""Answers of endpoints at their edges: cut, refused at length, with fields and thinking that callers ask for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from tests.pool.endpoints.scripted import answer, ask, event, refusal, refused, stream, text_of, words
from turnout.errors import Code
from turnout.part_choice import PartChoice
from turnout.types import FinishReason


async def test_a_server_that_breaks_off_after_its_first_event_is_left_alone(site):
    large = await site.server(stream(event({"content": "Hel"}), dies=True))
    pool = site.pool(None, large, retries=0, breaker_failures=2, breaker_open_s=1000)
    for _ in range(2):
        await refused(pool, ask())
    assert pool.stats().endpoints[0].breaker == "open"


async def test_a_long_refusal_is_a_refusal(site):
    large = await site.server(refusal(422, {"message": "x" * (1 << 17), "param": "messages"}))
    pool = site.pool(None, large, breaker_failures=1)
    error = await refused(pool, ask())
    assert error.code is Code.INVALID_ARGUMENT
    assert len(large.bodies) == 1
    assert pool.stats().endpoints[0].breaker == "closed"


async def test_an_answer_is_whole_where_only_its_end_does_not_come(site):
    large = await site.server(stream(event({"content": "all"}), event({}, "stop"), dies=True))
    chunks, usage = await answer(site.pool(None, large), ask())
    assert (text_of(chunks), chunks[-1].finish_reason) == ("all", FinishReason.STOP)
    assert "reports no usage" in usage.notes[0]


async def test_fields_of_an_answer_reach_a_server_that_knows_them_and_are_refused_elsewhere(site):
    sampling = {"min_tokens": 2, "bad_words": ("no",), "allowed_token_ids": (3, 4), "skip_special_tokens": False}
    call = replace(ask(sampling={**sampling, "max_tokens": 9, "thinking_token_budget": 5}), cache_salt="s")
    large = await site.server(words("ok"))
    await answer(site.pool(None, large, dialect="vllm"), call)
    [body] = large.bodies
    assert {name: body[name] for name in ("min_tokens", "bad_words", "allowed_token_ids", "skip_special_tokens")} == {
        "min_tokens": 2,
        "bad_words": ["no"],
        "allowed_token_ids": [3, 4],
        "skip_special_tokens": False,
    }
    assert (body["cache_salt"], body["thinking_token_budget"]) == ("s", 5)
    for name, value in sampling.items():
        error = await refused(site.pool(None, large), ask(sampling={name: value, "max_tokens": 9}))
        assert name in error.message
    assert "cache_salt" in (await refused(site.pool(None, large), replace(ask(), cache_salt="s"))).message
    _, usage = await answer(site.pool(None, large), ask(sampling={"thinking_token_budget": 5, "max_tokens": 9}))
    assert any("thinking_token_budget" in note for note in usage.notes)


@pytest.mark.parametrize(("mode", "seen"), [("split", ("hm", "ok")), ("hide", ("", "ok")), ("raw", ("", "hmok"))])
async def test_thinking_goes_where_the_caller_wants_it(site, mode, seen):
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 4}}
    last = json.dumps({"choices": [], "usage": usage}).encode()
    sent = stream(event({"reasoning": "hm"}), event({"content": "ok"}), event({}, "stop"), b"data: " + last + b"\n\n")
    chunks, used = await answer(site.pool(None, await site.server(sent)), replace(ask(), reasoning=mode))
    assert ("".join(chunk.reasoning for chunk in chunks), text_of(chunks)) == seen
    assert used.reasoning_tokens == 4


async def test_what_stopped_an_answer_is_passed_on(site):
    choice = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}
    sent = stream(event({"content": "a"}), b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    chunks, _ = await answer(site.pool(None, await site.server(sent)), ask())
    assert chunks[-1].stop == "END"


async def test_a_connection_is_used_again_where_the_end_of_a_stream_comes_after_its_last_event(site, monkeypatch):
    monkeypatch.setattr("pool.endpoints.client.END_S", 30.0)
    ports = set()

    async def script(request, body):
        ports.add(request.transport.get_extra_info("peername")[1])
        response = await words("a")(request, body)
        for _ in range(10):  # the client reads the last event before the end is written
            await asyncio.sleep(0)
        return response

    pool = site.pool(None, await site.server(script))
    for _ in range(3):
        await answer(pool, ask())
    assert len(ports) == 1


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp", "openai"])
async def test_what_broke_off_is_counted_as_the_server_counts_it(site, dialect):
    """vLLM merges tokens into one event where a client is slow; its counts, and llama.cpp's, come with each event."""
    shown = {"choices": [{"index": 0, "delta": {"content": "one two"}}]}
    shown |= {
        "vllm": {"usage": {"prompt_tokens": 7, "completion_tokens": 3}},
        "llama.cpp": {"timings": {"cache_n": 4, "prompt_n": 3, "predicted_n": 3}},
        "openai": {},
    }[dialect]
    large = await site.server(stream(b"data: " + json.dumps(shown).encode() + b"\n\n", dies=True))
    small = await site.server(words(" three", usage=(9, 1)))
    pool = site.pool(small, large, {"failover": {"continue_elsewhere": True}}, dialect="vllm")
    pool.models_by_name["big"].client.config = pool.models_by_name["big"].client.config.model_copy(
        update={"dialect": dialect}
    )
    chunks, usage = await answer(pool, ask(sampling={"max_tokens": 9}))
    assert text_of(chunks) == "one two three"
    broken = usage.models["big"]
    if dialect == "openai":  # four characters of a prompt, and pieces of text, stand for tokens
        assert (broken.prompt_tokens, broken.generated_tokens) == (1, 1)
        assert "reports no usage" in " ".join(usage.notes)
    else:
        assert (broken.prompt_tokens + broken.cached_tokens, broken.generated_tokens) == (7, 3)
    assert small.bodies[0]["max_tokens"] == 9 - broken.generated_tokens
    assert usage.completion_tokens == broken.generated_tokens + 1


@pytest.mark.parametrize("asked", [0, 2])
async def test_llama_cpp_gives_log_probabilities_only_with_alternatives(site, asked):
    top = [{"token": other, "logprob": -0.5} for other in "abc"[: max(asked, 1)]]
    said = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": top}]}
    large = await site.server(stream(event({"content": "a"}, "stop", logprobs=said)))
    chunks, _ = await answer(site.pool(None, large, dialect="llama.cpp"), ask(sampling={"logprobs": asked}))
    assert [len(token.top) for chunk in chunks for token in chunk.tokens] == [asked]
    assert large.bodies[0]["top_logprobs"] == max(asked, 1)
    prompt = replace(ask(sampling={"logprobs": asked}), messages=None, prompt="hi")
    await answer(site.pool(None, large, dialect="llama.cpp"), prompt)
    assert large.bodies[1]["logprobs"] == max(asked, 1)


async def test_a_context_is_part_of_the_prompt_and_a_contrast_is_refused(site):
    large = await site.server(words("ok"))
    pool = site.pool(None, large)
    await answer(pool, replace(ask(), context="Ann won."))
    [body] = large.bodies
    assert body["messages"][-1]["content"].startswith("Ann won.\n\n")
    error = await refused(pool, replace(ask(), contrast=PartChoice.of("cfg")))
    assert (error.field, "is an endpoint" in error.message) == ("contrast", True)
    error = await refused(pool, replace(ask(), uncertainty=PartChoice.of("snne")))
    assert (error.field, "is an endpoint" in error.message) == ("uncertainty", True)
    error = await refused(pool, replace(ask(), messages=None, prompt="a", add_special_tokens=False))
    assert (error.field, "is an endpoint" in error.message) == ("add_special_tokens", True)
