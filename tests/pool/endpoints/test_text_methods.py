"""Failover, methods, prices and routing over texts, against scripted servers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.pool.endpoints.scripted import (
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
from turnout.config import parse_config
from turnout.errors import Code, TurnoutError

# Failover


async def test_what_had_not_begun_is_answered_by_the_other(site):
    small, large = await site.server(words("ok")), await site.server(refusal(500))
    pool = site.pool(small, large, {"failover": {}}, retries=0, breaker_failures=1)
    for _ in range(2):
        chunks, usage = await answer(pool, ask())
        assert text_of(chunks) == "ok"
        assert "little answered in place of big" in usage.notes[0]
        assert list(usage.models) == ["little"]
    assert len(large.bodies) == 1  # its breaker is open
    error = await refused(pool, ask(model="big"))  # who asks for one model gets that one
    assert error.code is Code.UNAVAILABLE


async def test_refusals_are_no_reason_to_ask_another_model(site):
    small, large = await site.server(words("ok")), await site.server(refusal(400, {"message": "no"}))
    await refused(site.pool(small, large, {"failover": {}}), ask())
    assert not small.bodies


@pytest.mark.parametrize("goes_on", [False, True])
async def test_what_had_begun_goes_on_elsewhere_only_where_configured(site, goes_on):
    large = await site.server(stream(event({"content": "Hel"}), dies=True))
    small = await site.server(words("lo"))
    pool = site.pool(small, large, {"failover": {"continue_elsewhere": goes_on}}, dialect="vllm")
    if not goes_on:
        assert "broke off" in (await refused(pool, ask())).message
        return
    chunks, usage = await answer(pool, ask(sampling={"max_tokens": 9}))
    assert text_of(chunks) == "Hello"
    assert any("little continued in place of big" in note for note in usage.notes)
    assert usage.models["big"].generated_tokens == 1
    [body] = small.bodies
    assert body["messages"][-1] == {"role": "assistant", "content": "Hel"}
    assert (body["continue_final_message"], body["max_tokens"]) == (True, 8)


async def test_texts_go_on_elsewhere_from_their_text(site):
    def piece(text: str, finish: str | None = None) -> bytes:
        return (
            b"data: "
            + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}).encode()
            + b"\n\n"
        )

    large = await site.server(stream(piece("Hel"), dies=True))
    small = await site.server(stream(piece("lo", "stop"), usage_event(2, 1)))
    pool = site.pool(small, large, {"failover": {"continue_elsewhere": True}})
    chunks, _ = await answer(pool, ask(messages=None, prompt="Say: "))
    assert text_of(chunks) == "Hello"
    assert small.bodies[0]["prompt"] == "Say: Hel"


# Methods


@pytest.mark.parametrize(("logprob", "writes"), [(-0.01, "small"), (-2.0, "large")])
async def test_cascade_goes_by_the_log_probabilities_that_came(site, logprob, writes):
    small = await site.server(words("s1", "s2", logprob=logprob, usage=(10, 2)))
    large = await site.server(words("large", usage=(10, 1)))
    pool = site.pool(small, large)
    chunks, usage = await answer(pool, ask(method="cascade", params={"threshold": -0.5}))
    assert text_of(chunks) == {"small": "s1s2", "large": "large"}[writes]
    assert all(token.logprob is None for chunk in chunks for token in chunk.tokens)
    little = usage.models["little"]
    assert (little.generated_tokens, little.discarded_tokens) == ((2, 0) if writes == "small" else (0, 2))
    assert usage.switches == (writes == "large")


async def test_cascade_without_log_probabilities_is_refused_by_name(site):
    small, large = await site.server(words("s")), await site.server(words("l"))
    error = await refused(site.pool(small, large), ask(method="cascade"))
    assert "'little' gives none" in error.message
    assert not large.bodies


async def test_best_of_shows_what_most_agree_on_and_counts_the_rest(site):
    async def script(request, body):
        assert body["n"] == 3
        texts = ["Answer: 4", "Answer: 5", "Answer: 5"]
        pieces = [event({"content": text}, "stop", index) for index, text in enumerate(texts)]
        return await stream(*pieces, usage_event(10, 3), b"data: [DONE]\n\n")(request, body)

    pool = site.pool(None, await site.server(script))
    chunks, usage = await answer(pool, ask(method="best_of", params={"k": 3}))
    assert text_of(chunks) == "Answer: 5"
    assert (usage.models["big"].generated_tokens, usage.models["big"].discarded_tokens) == (1, 2)


async def test_several_answers_are_asked_for_one_by_one_where_a_server_knows_no_n(site):
    large = await site.server(words("a"))
    chunks, usage = await answer(site.pool(None, large, dialect="llama.cpp"), ask(sampling={"n": 3}))
    assert [text_of(chunks, index) for index in range(3)] == ["a"] * 3
    assert len({body["seed"] for body in large.bodies}) == 3
    assert usage.completion_tokens == 9


async def test_random_asks_each_model_its_share(site):
    small, large = await site.server(words("s")), await site.server(words("l"))
    pool = site.pool(small, large)
    for share, asked in ((0.0, small), (1.0, large)):
        await answer(pool, ask(method="random", params={"share": share}))
        assert len(asked.bodies) == 1
    both = [await answer(pool, ask(method="random", sampling={"seed": seed})) for seed in range(12)]
    assert {text_of(chunks) for chunks, _ in both} == {"s", "l"}


async def test_the_usage_has_the_price_of_what_was_asked(site):
    small, large = (
        await site.server(words("s", logprob=-9.0, usage=(100, 10))),
        await site.server(words("l", usage=(120, 20, 50))),
    )
    price = {"input_usd_per_mtok": 2.0, "output_usd_per_mtok": 8.0, "cached_input_usd_per_mtok": 1.0}
    models = {
        "little": {"endpoint": {"url": small.url, "model": "m"}, "price": {"output_usd_per_mtok": 1.0}},
        "big": {"endpoint": {"url": large.url, "model": "m"}, "price": price},
    }
    from pool.endpoints.text_pool import load_text_pool

    config = parse_config({"models": models, "pools": {"p": {"small": "little", "large": "big"}}})
    pool = load_text_pool("p", config, lambda *_: None)
    site.stack.push_async_callback(pool.close)
    _, usage = await answer(pool, ask(method="cascade"))
    assert usage.models["big"].usd == pytest.approx((70 * 2 + 50 * 1 + 20 * 8) / 1e6)
    assert usage.models["little"].usd == pytest.approx(10 / 1e6)
    assert usage.cost.spent.usd == pytest.approx(360 / 1e6)
    assert usage.cost.large_only.usd == pytest.approx((70 * 2 + 50 * 1 + 20 * 8) / 1e6)


# Routing


def split(share: float) -> dict[str, Any]:
    arms = {
        "weak": {"share": 1 - share, "method": {"name": "plain", "model": "small"}},
        "strong": {"share": share, "method": {"name": "plain", "model": "large"}},
    }
    return {"policy": {"name": "split", "params": {"arms": arms}}}


async def test_splits_budgets_and_rules_route_between_endpoints(site):
    small, large = await site.server(words("s")), await site.server(words("l"))
    for share, text in ((0.0, "s"), (1.0, "l")):
        chunks, usage = await answer(site.pool(small, large, {"routing": split(share)}), ask())
        assert text_of(chunks) == text
        assert usage.route["policy"] == "split"
    rule = {"when": {"pattern": "prove"}, "method": {"name": "plain", "model": "large"}}
    static = {"rules": [rule], "default": {"method": {"name": "plain", "model": "small"}}}
    pool = site.pool(small, large, {"routing": {"policy": {"name": "static", "params": static}}})
    assert text_of((await answer(pool, ask("prove it")))[0]) == "l"
    assert text_of((await answer(pool, ask("hello")))[0]) == "s"
    table = [
        {"method": {"name": "plain", "model": "small"}, "cost": 0.1, "quality": 0.5},
        {"method": {"name": "plain", "model": "large"}, "cost": 1.0, "quality": 1.0},
    ]
    pool = site.pool(small, large, {"routing": {"policy": {"name": "budget", "params": {"table": table}}}})
    from turnout.types import RouteLimits

    assert text_of((await answer(pool, ask(limits=RouteLimits(max_cost=0.2))))[0]) == "s"
    assert text_of((await answer(pool, ask(limits=RouteLimits(quality=0.9))))[0]) == "l"


async def test_a_route_to_a_method_that_needs_tokens_is_refused_when_the_pool_is_loaded(site):
    small, large = await site.server(words("s")), await site.server(words("l"))
    arms = {"a": {"share": 1.0, "method": {"name": "speculative"}}}
    with pytest.raises(TurnoutError, match="needs the tokens of its models"):
        site.pool(small, large, {"routing": {"policy": {"name": "split", "params": {"arms": arms}}}})


async def test_what_sessions_keep_goes_with_their_tenant(site):
    routing = {"policy": to_model("large"), "sticky": {"seconds": 600}}
    pool = site.pool(None, await site.server(words("a")), {"routing": routing})
    call = ask(session="s", explain=True)

    async def kept() -> bool:
        return bool((await answer(pool, call))[1].route["kept_from"])

    assert [await kept(), await kept()] == [False, True]
    pool.forget("somebody else")
    assert await kept()
    pool.forget(call.tenant)
    assert not await kept()


# Shadows


def to_model(role: str) -> dict[str, Any]:
    return {"name": "split", "params": {"arms": {role: {"share": 1.0, "method": {"name": "plain", "model": role}}}}}


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


SHADOW = {"share": 1.0, "policy": to_model("small"), "beside": 9}
SHADOWED = {"routing": {"policy": to_model("large"), "shadow": SHADOW}}
HELD = stream(event({"content": "held"}), holds=True)


async def test_a_request_ends_the_shadow_that_has_the_last_place_of_an_endpoint(site):
    small, large = await site.server(HELD, words("s")), await site.server(words("l"))
    pool = site.pool(small, large, SHADOWED, max_concurrency=1)
    assert text_of((await answer(pool, ask()))[0]) == "l"
    await until(lambda: small.running)
    assert text_of((await answer(pool, ask(model="little")))[0]) == "s"
    await until(lambda: small.closed.is_set() and not pool.stats().shadows)
    assert pool.stats().shadows_dropped == 1
    assert pool.stats().endpoints[0].breaker == "closed"


async def test_a_shadow_takes_no_place_that_a_request_has_and_is_not_tried_again(site):
    small, large = await site.server(HELD, refusal(500)), await site.server(words("l"))
    pool = site.pool(small, large, SHADOWED, max_concurrency=1, breaker_failures=1)
    request = pool.generate(ask(model="little"))
    await anext(request)
    await answer(pool, ask())
    await until(lambda: pool.stats().shadows_dropped)
    assert len(small.bodies) == 1
    await request.aclose()
    await answer(pool, ask())
    await until(lambda: len(small.bodies) == 2 and not pool.stats().shadows)
    assert len(large.bodies) == 2
    assert {each.breaker for each in pool.stats().endpoints} == {"closed"}


async def test_best_of_takes_what_chooses_by_texts_and_refuses_the_rest(site):
    async def script(request, body):
        texts = ["the cat sat", "the cat sat down", "dogs"]
        pieces = [event({"content": text}, "stop", index) for index, text in enumerate(texts)]
        return await stream(*pieces, usage_event(10, 3), b"data: [DONE]\n\n")(request, body)

    pool = site.pool(None, await site.server(script))
    words = {"name": "mbr", "utility": "token_f1"}
    chunks, usage = await answer(pool, ask(method="best_of", params={"k": 3, "rerank": words}))
    assert set(usage.measures) == {"expected_utility"}
    assert text_of(chunks) == "the cat sat"
    assert usage.candidates == ()
    _, usage = await answer(pool, replace(ask(method="best_of", params={"k": 3, "rerank": words}), candidates=True))
    [found] = usage.candidates
    assert [each.answers for each in found.candidates] == [(0,), (), ()]
    assert found.candidates[0].score == usage.measures["expected_utility"]
    for rerank in ("first_finish", {"name": "mbr", "utility": "embedding"}):
        error = await refused(pool, ask(method="best_of", params={"k": 3, "rerank": rerank}))
        assert "this value needs the tokens of its models" in error.message
    error = await refused(pool, ask(method="best_of", params={"k": 3, "rerank": "logprob"}))
    assert "'big' gives none; use majority" in error.message
