"""Calls made again: exactly what the client lacks is sent, or the call fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pool.local_pool import LocalPool
from pool.stop_strings import StopStrings
from tests.engine.harness import answer, call_of, random_prompts
from tests.pool.resuming import MADE_AGAIN, METHODS, RESUMABLE, Client, finish, had, part, rest
from turnout.calls import Chunk, Delivered, Event, GenerateCall, Regained
from turnout.errors import Code, TurnoutError
from turnout.registry import MethodInfo, all_methods, get_method
from turnout.types import FinishReason

PROMPT = [*b"ab ab. ab ab, ab 7.5 ab ab"]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 18, "ignore_eos": True}


def ids_of(methods: list[Any]) -> list[str]:
    return ["-".join([name, *map(str, params.values())]) for name, params, *_ in methods]


@pytest.mark.parametrize(("name", "params", "resumable"), METHODS, ids=ids_of(METHODS))
async def test_what_was_cut_off_anywhere_is_completed(
    pool: LocalPool, name: str, params: dict[str, Any], resumable: bool
) -> None:
    call = call_of(PROMPT, name, params, **SAMPLED)
    whole = await answer(pool, call)

    async def cut_off(num_chunks: int) -> Client:
        client = await part(pool, call, num_chunks)
        return client if client.usage is not None else await rest(pool, call, client)

    for client in await asyncio.gather(*map(cut_off, range(5))):
        assert client.ids[0] == whole.ids
        assert client.texts[0] == whole.text
        assert client.ended == [True]
        assert client.usage is not None
        assert client.usage.completion_tokens == len(whole.ids)
        assert client.usage.seed == whole.usage.seed


def test_every_method_that_says_it_is_resumable_is_proved_here() -> None:
    for name, params, resumable in METHODS:
        info = get_method(name)
        assert info.continues(info.parse(params), greedy=False) == resumable, (name, params)
    assert {info.name for info in all_methods() if info.resumable} == {name for name, _ in RESUMABLE}


@pytest.mark.parametrize(("name", "params"), RESUMABLE, ids=ids_of(RESUMABLE))
async def test_every_token_is_the_same_from_wherever_a_resumable_method_goes_on(
    pool: LocalPool, name: str, params: dict[str, Any]
) -> None:
    for options in (
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"logprobs": 2, "top_k": 20},
    ):
        await assert_goes_on(pool, call_of(PROMPT, name, params, **{**SAMPLED, **options}), 4 if options else 1)


async def assert_goes_on(pool: LocalPool, call: GenerateCall, every: int) -> None:
    """From every `every`-th token on, the rest is the same."""
    whole = await answer(pool, call)
    counts = range(0, len(whole.ids) + 1, every)
    shares = [had(pool, call, whole.ids, count) for count in counts]
    replies = await asyncio.gather(*(finish(pool, call, delivered) for delivered in shares))
    for count, delivered, reply in zip(counts, shares, replies, strict=True):
        assert reply.ids == whole.ids[count:], f"after {count} tokens"
        assert whole.text[: delivered.chars] + reply.text == whole.text
        assert reply.reasons == whole.reasons
        assert reply.usage.completion_tokens == len(whole.ids)
        assert [token.logprob for token in reply.tokens] == pytest.approx(
            [token.logprob for token in whole.tokens[count:]], abs=1e-3
        )


@pytest.mark.parametrize(("name", "params"), [("speculative", {"verifier": "rejection"})])
async def test_a_greedy_request_is_gone_on_with_under_any_lossless_law(
    pool: LocalPool, name: str, params: dict[str, Any]
) -> None:
    call = call_of(PROMPT, name, params, max_tokens=16, ignore_eos=True)
    whole = await answer(pool, call)
    for count in range(1, 16):
        reply = await finish(pool, call, had(pool, call, whole.ids, count))
        assert reply.ids == whole.ids[count:]
        assert f"continued after {count} tokens that were written elsewhere" in reply.usage.notes


async def test_going_on_costs_one_prefill(pool: LocalPool) -> None:
    call = call_of(PROMPT, "plain", max_tokens=24, ignore_eos=True)
    whole = await answer(pool, call)
    for engine in pool.engines.values():
        engine.pool.clear_cached()
    reply = await finish(pool, call, had(pool, call, whole.ids, 20))
    meter = reply.usage.models["large"]
    assert meter.generated_tokens == 4
    assert meter.forwards == 4
    assert meter.processed_tokens == len(PROMPT) + 23


async def test_a_flag_on_a_method_with_a_memory_would_be_found(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: where the next token depends on more than the tokens, going on gives another answer."""
    name, params = "entropy_adaptive", {"threshold": 2.0, "window": 4, "min_stay": 3}
    call = call_of(PROMPT, name, params, **{**SAMPLED, "max_tokens": 40})
    whole = await answer(pool, call)
    assert len(whole.runs) > 2
    monkeypatch.setattr(MethodInfo, "continues", lambda *_: True)
    rests = [(await finish(pool, call, had(pool, call, whole.ids, count))).ids for count in range(2, 30, 3)]
    assert any(got != whole.ids[count:] for got, count in zip(rests, range(2, 30, 3), strict=True))


async def test_an_answer_that_is_made_again_says_once_that_it_gets_on(pool: LocalPool) -> None:
    async def regained_in(call: GenerateCall) -> tuple[list[int], list[Event]]:
        """Where it is said of a call that was cut off, and all that comes of one that was not."""
        first = [event async for event in pool.generate(call)]
        ids = [token.id for event in first if isinstance(event, Chunk) for token in event.tokens]
        again = replace(call, delivered=(had(pool, call, ids, 8),))
        events = [event async for event in pool.generate(again)]
        return [place for place, event in enumerate(events) if isinstance(event, Regained)], first

    found = await asyncio.gather(
        *(regained_in(call_of(PROMPT, name, params, **SAMPLED)) for name, params, _ in METHODS)
    )
    for (name, _, resumable), (regained, first) in zip(METHODS, found, strict=True):
        # A method may give its first segment all at once, with something new in it.
        assert regained == [] if resumable else regained in ([0], []), name
        if name in ("random_switch", "entropy_adaptive"):
            assert regained == [0]
        assert not any(isinstance(event, Regained) for event in first)


async def test_an_answer_that_differs_from_what_was_delivered_fails(pool: LocalPool) -> None:
    for name, params in MADE_AGAIN:
        call = call_of(PROMPT, name, params, **SAMPLED)
        ids = (await answer(pool, call)).ids
        for place in (0, 3, 7):
            wrong = [*ids[:place], (ids[place] + 1) % 256]
            with pytest.raises(TurnoutError, match=f"token {place} is {ids[place]} and was {wrong[-1]}") as failed:
                await finish(pool, call, Delivered(tuple(wrong), 0))
            assert failed.value.code is Code.INTERNAL
            assert "with dtype float32, or a method that continues from" in failed.value.message


async def test_more_than_the_answer_cannot_have_been_delivered(pool: LocalPool) -> None:
    again = call_of(PROMPT, "random_switch", **SAMPLED)
    longer = call_of(PROMPT, "random_switch", **{**SAMPLED, "max_tokens": 19})
    whole = await answer(pool, again)
    for method in ("random_switch", "plain"):
        ids = (await answer(pool, call_of(PROMPT, method, **SAMPLED))).ids
        stopped = call_of(PROMPT, method, **{**SAMPLED, "stop_token_ids": (ids[5],)})
        end = ids.index(ids[5]) + 1
        with pytest.raises(TurnoutError, match=f"ends after {end} of") as failed:
            await finish(pool, stopped, Delivered(tuple(ids), 0))
        assert failed.value.code is Code.INTERNAL
    with pytest.raises(TurnoutError, match="its text ends 3 characters before"):
        await finish(pool, again, Delivered(tuple(whole.ids), len(whole.text) + 3))
    assert (await answer(pool, longer)).ids[:18] == whole.ids


@pytest.mark.parametrize("name", ["plain", "random_switch"])
async def test_a_finished_answer_gets_its_reason_once(pool: LocalPool, name: str) -> None:
    call = call_of(PROMPT, name, **SAMPLED)
    whole = await answer(pool, call)
    reply = await finish(pool, call, Delivered(tuple(whole.ids), len(whole.text)))
    assert (reply.ids, reply.text, reply.reasons) == ([], "", [FinishReason.LENGTH])
    assert reply.usage.completion_tokens == len(whole.ids)
    reply = await finish(pool, call, Delivered(tuple(whole.ids), len(whole.text), finished=True))
    assert (reply.ids, reply.text, reply.reasons) == ([], "", [None])
    assert reply.usage.completion_tokens == len(whole.ids)
    assert not reply.usage.models


@pytest.mark.parametrize("name", ["plain", "random_switch"])
async def test_stop_strings_across_the_boundary(pool: LocalPool, name: str) -> None:
    free = await answer(pool, call_of(PROMPT, name, **SAMPLED))
    for start in range(0, len(free.text) - 4, 3):
        call = call_of(PROMPT, name, **{**SAMPLED, "stop": (free.text[start : start + 4], "never seen")})
        whole = await answer(pool, call)
        assert whole.text == free.text[: free.text.index(free.text[start : start + 4])]
        shares = [had(pool, call, whole.ids, count) for count in range(len(whole.ids) + 1)]
        replies = await asyncio.gather(*(finish(pool, call, delivered) for delivered in shares))
        for count, (delivered, reply) in enumerate(zip(shares, replies, strict=True)):
            assert whole.text[: delivered.chars] + reply.text == whole.text
            assert reply.ids == whole.ids[count:]
            assert reply.reasons == [FinishReason.STOP]


async def test_half_characters_across_the_boundary(pool: LocalPool) -> None:
    """Tokens are bytes: any cut inside a character leaves text behind its tokens."""
    text = "naïve Ωμέγα 数学 🚂!"
    ids = pool.tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    call = call_of([*b"say"], "plain", max_tokens=len(ids) + 3, ignore_eos=True)
    lagging = 0
    for count in range(len(ids) + 1):
        delivered = had(pool, call, ids, count)
        lagging += delivered.chars < len(pool.decode(ids[:count]))
        reply = await finish(pool, call, delivered)
        assert text[: delivered.chars] + reply.text == written(pool, call, [*ids[:count], *reply.ids])
    assert lagging > 10


def written(pool: LocalPool, call: GenerateCall, ids: list[int]) -> str:
    """The text of a whole answer."""
    text = StopStrings(pool.tokenizer.detokenizer(call.prompt), ())  # type: ignore[arg-type]
    for token in ids:
        text.feed(token)
    return text.take(final=True)


async def test_each_of_several_answers_goes_on_where_it_was(pool: LocalPool) -> None:
    for name in ("plain", "random_switch"):
        call = call_of(PROMPT, name, n=3, **SAMPLED)
        whole = await answer(pool, call)
        cuts = (18, 0, 7)
        delivered = [had(pool, call, ids, cut) for ids, cut in zip(map(_ids, whole.answers), cuts, strict=True)]
        reply = await finish(pool, call, *delivered)
        for index, cut in enumerate(cuts):
            assert _ids(reply.answers[index]) == _ids(whole.answers[index])[cut:]
            assert whole.texts[index][: delivered[index].chars] + reply.texts[index] == whole.texts[index]
        assert reply.usage.completion_tokens == 54
        some = await finish(pool, call, delivered[0])
        assert [len(tokens) for tokens in some.answers] == [0, 18, 18]


async def test_the_deadline_holds_while_delivered_tokens_are_made_again(pool: LocalPool) -> None:
    call = call_of(PROMPT, "random_switch", **{**SAMPLED, "max_tokens": 300})
    whole = await answer(pool, call)
    late = call_of(PROMPT, "random_switch", **{**SAMPLED, "max_tokens": 300}, deadline_s=0.02)
    with pytest.raises(TurnoutError) as failed:
        await finish(pool, late, Delivered(tuple(whole.ids[:299]), 0))
    assert failed.value.code is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("options", "delivered", "code", "says"),
    [
        ({"seed": None}, (Delivered((1,)),), Code.INVALID_ARGUMENT, "needs sampling.seed"),
        ({}, (Delivered((1,)), Delivered((1,))), Code.INVALID_ARGUMENT, "has 2 answers; the call asks for 1"),
        ({"max_tokens": 2}, (Delivered((1, 2, 3)),), Code.OUT_OF_RANGE, "at most max_tokens, 2"),
        ({}, (Delivered((261,)),), Code.OUT_OF_RANGE, "token id 261; allowed: 0 to 260"),
    ],
)
async def test_what_cannot_have_been_delivered_is_refused(
    pool: LocalPool, options: dict[str, Any], delivered: tuple[Delivered, ...], code: Code, says: str
) -> None:
    with pytest.raises(TurnoutError, match=says) as refused:
        await finish(pool, call_of(PROMPT, "plain", **options), *delivered)
    assert refused.value.code is code


async def test_going_on_shares_batches_with_other_calls(pool: LocalPool) -> None:
    """Continued calls between new ones: everybody's tokens are their own."""
    prompts = random_prompts(6, 40, seed=4)
    calls: list[GenerateCall] = [
        call_of(prompt, "plain" if place % 2 else "speculative", **{**SAMPLED, "seed": place})
        for place, prompt in enumerate(prompts)
    ]
    whole = [await answer(pool, call) for call in calls]
    cuts = [0, 5, 9, 0, 17, 1]
    replies = await asyncio.gather(
        *(
            finish(pool, call, had(pool, call, each.ids, cut))
            for call, each, cut in zip(calls, whole, cuts, strict=True)
        )
    )
    for reply, each, cut in zip(replies, whole, cuts, strict=True):
        assert reply.ids == each.ids[cut:]


def _ids(tokens: Any) -> list[int]:
    return [token.id for token in tokens]


async def test_words_that_a_monitor_put_in_are_put_in_again_where_they_were(pool: LocalPool) -> None:
    """The verdict of the first time is late the second time: here, it never comes."""

    def call(share: float) -> GenerateCall:
        monitor = {
            "name": "trim",
            "asks": "number",
            "give_up_share": share,
            "force": "#!",
            "loop_tokens": 400,
            "thinking_start": "",
        }
        return call_of(PROMPT, "monitored", {"monitor": monitor}, max_tokens=40, ignore_eos=True)

    whole, never = await answer(pool, call(0.4)), await answer(pool, call(1.0))
    place = next(at for at, (one, two) in enumerate(zip(whole.ids, never.ids, strict=True)) if one != two)
    assert pool.decode(whole.ids[place : place + 2]) == "#!"
    for count in (place + 2, place + 5, 39):
        reply = await finish(pool, call(1.0), had(pool, call(0.4), whole.ids, count))
        assert reply.ids == whole.ids[count:]
