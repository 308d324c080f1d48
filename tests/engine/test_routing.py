"""Routing in a pool: what a decision does to an answer, sessions, the log, replays."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.route import _decide
from decoding.model import ModelPool, Readout
from decoding.sequence import Sequence
from deployments.schemas import chat_job
from engine.model import EngineModel
from pool.local_pool import LocalPool
from pool.routing import Routing, _asked_again
from pool.validation import PreparedRequest
from router.decision import Decision
from router.routing import Router
from router.summary import read_log
from tests.engine.harness import answer, ask, call_of
from tests.engine.routed import PROMPT, STATIC, Chosen, Opened, ask_auto, choose, routed_config
from turnout.calls import ChatMessage, GenerateCall
from turnout.config import StickyConfig
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.types import RouteLimits


async def test_what_a_rule_chooses_is_what_runs(opened: Opened) -> None:
    pool = opened({"policy": STATIC})
    for prompt, method, params in ((PROMPT, "plain", {"model": "small"}), ([65] * 30, "plain", {"model": "large"})):
        for asked in ("auto", None):
            reply = await ask(pool, prompt, asked)
            assert reply.ids == (await ask(pool, prompt, method, params)).ids
            assert (reply.usage.method, reply.usage.params) == (method, params)
    reply = await ask(pool, "a spec", None)
    assert (reply.usage.method, reply.usage.params["draft_length"]) == ("speculative", 3)
    assert (await ask(pool, "a spec", "plain")).usage.route is None


async def test_an_explanation_comes_when_it_is_asked_for(opened: Opened) -> None:
    pool = opened({"policy": STATIC})
    short, full = [(await ask_auto(pool, explain=explain)).usage.route for explain in (False, True)]
    assert short is not None
    assert full is not None
    assert full["features"] == {"prompt_tokens": 5, "max_tokens": 16, "rule": 0}
    assert full["reason"] == "no rule fits"
    assert short == {**full, "features": {}, "scores": {}, "limits": {}}


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that were asked to read a state once more, which takes a turn of its own on the device."""
    found: list[str] = []

    async def told(self: EngineModel, *args: Any, **kwargs: Any) -> list[Readout]:
        found.append(self.name)
        return await before(self, *args, **kwargs)

    before = EngineModel.read
    monkeypatch.setattr(EngineModel, "read", told)
    return found


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 1}, {"logprobs": 3}, {"token_details": True}],
)
@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("plain", {"model": "small"}),
        ("entropy_adaptive", {"threshold": 4.0, "window": 1, "min_stay": 1, "effect": "current"}),
    ],
)
async def test_reading_the_prompt_costs_no_forward_where_the_small_model_begins(
    opened: Opened, readings: list[str], method: str, params: dict[str, Any], sampling: dict[str, Any]
) -> None:
    pool = opened({"policy": STATIC})
    plain = await ask(pool, PROMPT, method, params, tenant="a", **sampling)
    choose(pool, method, params)
    routed = await ask_auto(pool, tenant="b", **sampling)
    assert [token.id for token in routed.tokens] == plain.ids
    assert [token.source for token in routed.tokens] == [token.source for token in plain.tokens]
    for ours, theirs in zip(routed.tokens, plain.tokens, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.entropy_bits == pytest.approx(theirs.entropy_bits, abs=1e-4)
        assert [each[0] for each in ours.top] == [each[0] for each in theirs.top]
    assert readings == []
    for name, meter in plain.usage.models.items():
        assert routed.usage.models[name].forwards == meter.forwards
        assert routed.usage.models[name].processed_tokens == meter.processed_tokens


async def test_the_large_model_answers_as_it_does_alone_and_the_reading_is_counted(opened: Opened) -> None:
    pool = opened({"policy": STATIC})
    alone = await ask(pool, PROMPT, tenant="a")
    choose(pool, "plain", {})
    routed = await ask_auto(pool, tenant="b")
    assert routed.ids == alone.ids
    assert routed.usage.models["large"] == alone.usage.models["large"]
    small = routed.usage.models["small"]
    assert (small.forwards, small.prompt_tokens, small.generated_tokens) == (1, len(PROMPT), 0)


async def test_sampling_and_suffix_of_a_decision_are_used(opened: Opened, readings: list[str]) -> None:
    pool = opened({"policy": STATIC})
    choose(pool, "plain", {"model": "small"}, sampling={"temperature": 0.0, "max_tokens": 5}, suffix=" Briefly.")
    routed = await ask_auto(pool, "question", temperature=1.0, n=2, max_tokens=9, ignore_eos=True)
    expected = await ask(pool, "question Briefly.", "plain", {"model": "small"}, max_tokens=5, ignore_eos=True)
    assert [[token.id for token in tokens] for tokens in routed.answers] == [expected.ids] * 2
    assert routed.usage.prompt_tokens == expected.usage.prompt_tokens
    by_ids = await ask_auto(pool, pool.tokenizer.encode("question"), ignore_eos=True)
    assert by_ids.ids == expected.ids
    chat = await answer(pool, call_of(None, "auto", messages=(ChatMessage("user", "question"),), ignore_eos=True))
    told = (ChatMessage("user", "question Briefly."),)
    plain = call_of(None, "plain", {"model": "small"}, messages=told, ignore_eos=True, max_tokens=5)
    assert chat.ids == (await answer(pool, plain)).ids
    choose(pool, "plain", {}, sampling={"max_tokens": 50})
    assert len((await ask_auto(pool, max_tokens=3, ignore_eos=True)).ids) == 3
    assert readings == []
    choose(pool, "plain", {"model": "small"}, sampling={"temperature": 0.0})
    cold = await ask_auto(pool, temperature=1.0, n=3)
    assert [[t.id for t in each] for each in cold.answers] == [
        (await ask(pool, PROMPT, "plain", {"model": "small"})).ids
    ] * 3
    assert readings == ["small"]  # the first answer's token, which had been drawn at another temperature


@pytest.mark.parametrize(
    ("sampling", "options", "as_if"),
    [
        ({"max_tokens_share": 0.4}, {"max_tokens": 16}, {"max_tokens": 6}),
        ({"max_tokens_share": 0.4}, {"max_tokens": 1}, {"max_tokens": 1}),
        ({"max_tokens": 8, "max_tokens_share": 0.5}, {"max_tokens": 40}, {"max_tokens": 4}),
        ({"greedy_temperature": 0.8}, {"temperature": 0.0}, {"temperature": 0.8}),
        ({"greedy_temperature": 0.8}, {"temperature": 1.2}, {"temperature": 1.2}),
    ],
)
async def test_sampling_that_follows_the_callers_own(
    opened: Opened, sampling: dict[str, Any], options: dict[str, Any], as_if: dict[str, Any]
) -> None:
    pool = opened({"policy": STATIC})
    choose(pool, "plain", {"model": "small"}, sampling=sampling)
    routed = await ask_auto(pool, **options, seed=3, ignore_eos=True)
    alone = await ask(pool, PROMPT, "plain", {"model": "small"}, **{**options, **as_if}, seed=3, ignore_eos=True)
    assert routed.ids == alone.ids


async def test_a_session_keeps_its_way_and_each_request_its_own_sampling(opened: Opened) -> None:
    """The first request is short and greedy; the second one asks for a longer and warmer answer."""
    pool = opened({"policy": STATIC})
    decision = Decision(
        "plain", {"model": "small"}, "chosen", "0" * 12,
        sampling={"max_tokens_share": 0.4, "greedy_temperature": 0.8},
    )  # fmt: skip
    assert pool.routing is not None
    pool.routing.router = Router(Chosen(decision), StickyConfig())
    lengths = []
    for place, (max_tokens, temperature) in enumerate(((10, 0.0), (50, 1.3))):
        call = call_of(PROMPT, "auto", max_tokens=max_tokens, temperature=temperature, seed=3, ignore_eos=True)
        routed = await answer(pool, replace(call, request_id=f"r{place}", session="s"))
        assert routed.usage.route is not None
        assert routed.usage.route["kept_from"] == ("r0" if place else "")
        lengths.append(len(routed.ids))
        used = {"max_tokens": lengths[-1], "temperature": temperature or 0.8}
        alone = await ask(pool, PROMPT, "plain", {"model": "small"}, **used, seed=3, ignore_eos=True)
        assert routed.ids == alone.ids
    assert lengths == [4, 20]


async def test_a_decision_no_request_may_have_fails_alone(opened: Opened) -> None:
    pool = opened({"policy": STATIC})
    for sampling in ({"seed": 1}, {"temperature": 9.0}):
        choose(pool, "plain", {}, sampling=sampling)
        with pytest.raises(TurnoutError) as caught:
            await ask_auto(pool, n=2)
        assert caught.value.code is Code.INTERNAL
    assert (await ask(pool, PROMPT)).ids


@pytest.mark.parametrize(
    ("call", "field", "says"),
    [
        (call_of(PROMPT, "auto", {"model": "small"}), "params", "belong to a method"),
        (call_of(PROMPT, None, {"model": "small"}), "params", "belong to a method"),
        (call_of(PROMPT, "auto", model="large"), "method", "is one model"),
    ],
)
async def test_bad_calls_are_refused_by_field(opened: Opened, call: GenerateCall, field: str, says: str) -> None:
    pool = opened({"policy": STATIC})
    with pytest.raises(TurnoutError, match=says) as caught:
        await answer(pool, call)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "call", [call_of(PROMPT, "plain"), call_of(PROMPT, None, model="large"), call_of(PROMPT, "plain", model="small")]
)
async def test_limits_are_refused_where_nothing_is_routed(opened: Opened, call: GenerateCall) -> None:
    pool = opened({"policy": STATIC})
    with pytest.raises(TurnoutError, match=r"^limits\.max_cost: is for a pool's routing"):
        await answer(pool, replace(call, limits=RouteLimits(max_cost=0.1)))


async def test_limits_are_refused_in_a_pool_without_a_routing(pool: LocalPool) -> None:
    with pytest.raises(TurnoutError, match=r"^limits\.quality: is for a pool's routing"):
        await answer(pool, replace(call_of(PROMPT, None), limits=RouteLimits(quality=0.1)))


async def test_auto_without_a_routing_is_refused(pool: LocalPool) -> None:
    with pytest.raises(TurnoutError, match="method: auto: pool 'pair' has no routing"):
        await ask(pool, PROMPT, "auto")


async def test_a_limit_of_the_request_reaches_the_policy(opened: Opened) -> None:
    table = [{"method": {"name": "plain", "model": "small"}, "cost": 0.5, "quality": 0.5}]
    pool = opened({"policy": {"name": "budget", "params": {"table": table}}})
    call = replace(call_of(PROMPT, "auto"), limits=RouteLimits(quality=0.9))
    with pytest.raises(TurnoutError, match=r"limits\.quality: 0\.9 cannot be kept: 0\.5 can be had"):
        await answer(pool, call)
    assert (await answer(pool, replace(call, limits=RouteLimits(quality=0.4)))).usage.method == "plain"


async def test_the_log_has_every_request_and_no_text_unless_configured(opened: Opened, tmp_path: Path) -> None:
    for texts in (False, True):
        path = tmp_path / f"{texts}.jsonl"
        pool = opened({"policy": STATIC, "log": {"path": str(path), "texts": texts}})
        reply = await answer(pool, replace(call_of("secret", "auto", tenant="t"), session="s"))
        stream = pool.generate(call_of("secret", "auto", ignore_eos=True, max_tokens=100))
        await anext(stream)
        await stream.aclose()
        await pool.close()
        first, second = list(read_log(path))
        assert (first["tenant"], first["session"], first["outcome"]["status"]) == ("t", "s", "OK")
        assert first["decision"]["method"] == "plain"
        assert first["outcome"]["completion_tokens"] == len(reply.ids)
        assert second["outcome"]["status"] == "CANCELLED"
        assert ("secret" in path.read_text()) is texts
        if texts:
            assert (first["answers"], first["request"]["prompt"]) == ([reply.text], "secret")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
async def test_entries_that_the_log_loses_are_told_with_what_the_pool_holds(opened: Opened) -> None:
    pool = opened({"policy": STATIC, "log": {"path": "/dev/full"}})
    await ask_auto(pool)
    await pool.close()
    assert pool.stats().log_dropped == 1


async def test_a_call_that_goes_on_elsewhere_is_logged_there(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    pool = opened({"policy": STATIC, "log": {"path": str(path)}})
    stream = pool.generate(call_of("x", "auto", ignore_eos=True, max_tokens=100))
    await anext(stream)
    assert pool.hand_over() == 1
    with pytest.raises(Interrupted):
        async for _ in stream:
            pass
    reply = await ask_auto(pool)
    await pool.close()
    assert [each["outcome"].get("completion_tokens") for each in read_log(path)] == [len(reply.ids)]


async def test_what_an_arm_refuses_is_logged_as_that_arms(opened: Opened, tmp_path: Path) -> None:
    """A bare method keeps no limit: whoever compares arms must see that it left the request unanswered."""
    table = [{"method": {"name": "plain", "model": "small"}, "cost": 0.1, "quality": 0.5}]
    arms = {
        "old": {"share": 0.5, "policy": {"name": "budget", "table": table}},
        "new": {"share": 0.5, "method": {"name": "plain", "model": "small"}},
    }
    pool = opened({"policy": {"name": "split", "params": {"arms": arms}}, "log": {"path": str(tmp_path / "log")}})
    for number in range(12):
        call = replace(call_of(PROMPT, "auto"), request_id=f"r{number}", limits=RouteLimits(max_cost=1.0))
        with suppress(TurnoutError):
            await answer(pool, call)
    await pool.close()
    statuses = {"old": set[str](), "new": set[str]()}
    for each in read_log(tmp_path / "log"):
        decided = each["decision"] or each["refused"]
        assert 0 <= decided["features"]["place"] < 1
        statuses[decided["arm"]].add(each["outcome"]["status"])
    assert statuses == {"old": {"OK"}, "new": {"INVALID_ARGUMENT"}}


async def test_a_decision_is_replayed_without_an_answer(opened: Opened, tmp_path: Path) -> None:
    arms = {name: {"share": 0.5, "method": {"name": "plain", "model": name}} for name in ("small", "large")}
    routing = {"policy": {"name": "split", "params": {"arms": arms}}, "log": {"path": str(tmp_path / "log")}}
    pool = opened(routing)
    calls = [replace(call_of(PROMPT, "auto"), request_id=f"r{n}", explain=True) for n in range(12)]
    recorded = [Decision.of_json((await answer(pool, call)).usage.route) for call in calls]
    assert {decision.arm for decision in recorded} == {"small", "large"}
    assert [await pool.explain(call) for call in calls] == recorded
    assert await _decide(calls[0], routed_config(opened.folder, routing)) == recorded[0]
    with pytest.raises(TurnoutError, match="the request is not routed: it names 'plain'"):
        await pool.explain(call_of(PROMPT, "plain"))
    await pool.close()
    assert len(json.loads(f"[{','.join((tmp_path / 'log').read_text().splitlines())}]")) == 12


async def test_an_explanation_reads_the_prompt_as_the_request_would(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same room for an answer: some models compute by how long a sequence may become."""
    pool, lengths = opened({"policy": STATIC}), list[int]()
    route = Routing.route

    async def noted(self: Routing, prepared: PreparedRequest, seq: Sequence, models: ModelPool) -> Any:
        lengths.append(seq.greatest_length)
        return await route(self, prepared, seq, models)

    monkeypatch.setattr(Routing, "route", noted)
    call = call_of(PROMPT, "auto", max_tokens=10**6, stop=(), ignore_eos=False)
    await pool.explain(call)
    assert lengths == [pool.max_length - 1]
    await pool.close()


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
OTHER_TOOL = {"type": "function", "function": {"name": "now"}}
ANSWERED_BY_A_TOOL = [
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "yes", "tool_call_id": "c1"},
]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": [*TOOLS, OTHER_TOOL], "tool_choice": {"function": {"name": "now"}}},
        {"tools": TOOLS, "parallel_tool_calls": False, "decoding": {"structure": {"regex": "a"}}},
        {"decoding": {"structure": {"choice": ["a", "b"]}}},
    ],
)
def test_a_logged_chat_is_the_call_that_was_made(more: dict[str, Any]) -> None:
    job = chat_job({"model": "pair", "messages": ANSWERED_BY_A_TOOL, "max_tokens": 9, **more})
    [call], [again] = job.calls, chat_job(_asked_again(job.calls[0])).calls
    assert (again.messages, again.tools, again.sampling) == (call.messages, call.tools, call.sampling)
