"""Routing in a pool: what a decision does to an answer, the log, shadows, swapped artifacts, replays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.route import _decide
from decoding.artifacts import Artifact
from decoding.model import ModelPool
from engine.pool import LocalPool
from router.base import Asked, Kept, RoutingPolicy
from router.decision import Decision
from router.routing import Router
from router.summary import read_log
from tests.engine.harness import Reply, answer, ask, ask_all, call_of, pair_config
from turnout.calls import ChatMessage, GenerateCall
from turnout.config import RoutingConfig, TurnoutConfig
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.types import RouteLimits

PROMPT = [65, 66, 67, 68, 69]
RULES = [
    {"when": {"prompt_tokens": {"min": 20}}, "method": {"name": "plain", "model": "large"}},
    {"when": {"pattern": "spec"}, "method": {"name": "speculative", "draft_length": 3}},
]
STATIC = {"name": "static", "params": {"rules": RULES, "default": {"method": {"name": "plain", "model": "small"}}}}
LARGE = {"name": "static", "params": {"default": {"method": "plain"}}}


def routed_config(folder: Path, routing: dict[str, Any], **pool: Any) -> TurnoutConfig:
    config = pair_config(folder, block_size=8, token_budget=48)
    settings = config.pools["pair"].model_copy(update={"routing": RoutingConfig(**routing), **pool})
    return config.model_copy(update={"pools": {"pair": settings}})


class Opened:
    """Opens pools with a routing; closes them, and looks that nothing is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: list[LocalPool] = []

    def __call__(self, routing: dict[str, Any], **pool: Any) -> LocalPool:
        self.pools.append(LocalPool.load("pair", routed_config(self.folder, routing, **pool)))
        return self.pools[-1]


@pytest.fixture
async def opened(pair_folder: Path) -> AsyncIterator[Opened]:
    factory = Opened(pair_folder)
    yield factory
    for pool in factory.pools:
        await pool.close()
        stats = pool.stats()
        assert (stats.requests, stats.sequences, stats.used_blocks, stats.shadows) == (0, 0, 0, 0)


class Chosen(RoutingPolicy):
    """Decides what it is told, after it has read the prompt."""

    def __init__(self, decision: Decision, reads: bool = True) -> None:
        super().__init__()
        self.decision = decision
        self.reads = reads

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        if self.reads:
            row = await asked.read(models)
            assert row.entropy_bits is not None
            return replace(self.decision, features={"entropy_bits": row.entropy_bits})
        return self.decision


def choose(pool: LocalPool, method: str, params: dict[str, Any], **more: Any) -> None:
    assert pool.routing is not None
    reads = more.pop("reads", True)
    decision = Decision(method, params, "chosen", "0" * 12, reason="told so", **more)
    pool.routing.router = Router(Chosen(decision, reads))


async def ask_auto(pool: LocalPool, prompt: Any = None, **options: Any) -> Reply:
    explain = options.pop("explain", False)
    return await answer(pool, replace(call_of(prompt or PROMPT, "auto", **options), explain=explain))


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


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}])
@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("plain", {"model": "small"}),
        ("entropy_adaptive", {"threshold": 4.0, "window": 1, "min_stay": 1, "effect": "current"}),
    ],
)
async def test_reading_the_prompt_costs_no_forward_where_the_small_model_begins(
    opened: Opened, method: str, params: dict[str, Any], sampling: dict[str, Any]
) -> None:
    pool = opened({"policy": STATIC})
    plain = await ask(pool, PROMPT, method, params, tenant="a", **sampling)
    choose(pool, method, params)
    routed = await ask_auto(pool, tenant="b", **sampling)
    assert [token.id for token in routed.tokens] == plain.ids
    assert [token.source for token in routed.tokens] == [token.source for token in plain.tokens]
    for ours, theirs in zip(routed.tokens, plain.tokens, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [each[0] for each in ours.top] == [each[0] for each in theirs.top]
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


async def test_sampling_and_suffix_of_a_decision_are_used(opened: Opened) -> None:
    pool = opened({"policy": STATIC})
    choose(pool, "plain", {"model": "small"}, sampling={"temperature": 0.0, "max_tokens": 5}, suffix=" Briefly.")
    routed = await ask_auto(pool, "question", temperature=1.0, n=2, max_tokens=9, ignore_eos=True)
    expected = await ask(pool, "question Briefly.", "plain", {"model": "small"}, max_tokens=5, ignore_eos=True)
    assert [[token.id for token in tokens] for tokens in routed.answers] == [expected.ids] * 2
    assert routed.usage.prompt_tokens == expected.usage.prompt_tokens
    by_ids = await ask_auto(pool, pool.encode("question"), ignore_eos=True)
    assert by_ids.ids == expected.ids
    chat = await answer(pool, call_of(None, "auto", messages=(ChatMessage("user", "question"),), ignore_eos=True))
    told = (ChatMessage("user", "question Briefly."),)
    plain = call_of(None, "plain", {"model": "small"}, messages=told, ignore_eos=True, max_tokens=5)
    assert chat.ids == (await answer(pool, plain)).ids
    choose(pool, "plain", {}, sampling={"max_tokens": 50})
    assert len((await ask_auto(pool, max_tokens=3, ignore_eos=True)).ids) == 3
    choose(pool, "plain", {"model": "small"}, sampling={"temperature": 0.0})
    cold = await ask_auto(pool, temperature=1.0, n=3)
    assert [[t.id for t in each] for each in cold.answers] == [
        (await ask(pool, PROMPT, "plain", {"model": "small"})).ids
    ] * 3


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


async def settled(pool: LocalPool) -> None:
    """Until no shadow is left."""
    async with asyncio.timeout(30):
        while pool.stats().shadows:
            await asyncio.sleep(0)


async def test_a_shadow_runs_apart_and_is_not_billed(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    pool = opened({"policy": STATIC, "shadow": {"share": 1, "policy": LARGE}, "log": {"path": str(path)}})
    alone = await ask(pool, PROMPT, "plain", {"model": "small"}, tenant="x")
    reply = await ask_auto(pool, tenant="y")
    assert set(reply.usage.models) == {"small"}
    assert reply.usage.models["small"].processed_tokens == alone.usage.models["small"].processed_tokens
    assert pool.stats().requests == 0
    await settled(pool)
    expected = await ask(pool, PROMPT)
    await pool.close()
    request, shadow = list(read_log(path))
    assert (request["kind"], shadow["kind"]) == ("request", "shadow")
    assert request["request_id"] == shadow["request_id"]
    assert shadow["outcome"]["large_share"] == 1.0
    assert shadow["same_text"] is (expected.text == reply.text)
    assert request["outcome"]["large_share"] == 0.0


async def test_a_shadow_asks_nothing_of_a_model_while_a_request_is_in_progress(opened: Opened) -> None:
    pool = opened({"policy": STATIC, "shadow": {"share": 1, "policy": LARGE}})
    await ask_auto(pool, ignore_eos=True, max_tokens=60)
    large = pool.engines["large"].batcher
    while not large.tables:  # until the shadow has begun
        await asyncio.sleep(0)
    stream = pool.generate(call_of([70, 71], "plain", {"model": "small"}, ignore_eos=True, max_tokens=60))
    await anext(stream)
    lengths = [max((len(seq) for seq in large.tables), default=0) async for _ in stream]
    # At most the operation that was under way goes on: from the second event on, nothing moves.
    assert len(lengths) > 3
    assert len(set(lengths[1:-1])) == 1
    await settled(pool)
    assert pool.stats().shadows_dropped == 0


async def test_a_full_pool_drops_its_shadows_and_closing_ends_them(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    shadow = {"share": 1, "policy": LARGE}
    pool = opened({"policy": STATIC, "shadow": shadow, "log": {"path": str(path)}}, max_ongoing_requests=1)
    await ask_auto(pool, ignore_eos=True, max_tokens=60)
    assert pool.stats().shadows == 1
    together = [call_of([70 + place], "plain", ignore_eos=True, tenant="t") for place in range(3)]
    await ask_all(pool, together)
    assert (pool.stats().shadows, pool.stats().shadows_dropped) == (0, 1)
    await ask_auto(pool, ignore_eos=True, max_tokens=200)
    while not pool.engines["large"].batcher.tables:
        await asyncio.sleep(0)
    await pool.close()
    assert pool.stats().shadows_dropped == 2
    assert [(each["kind"], each["outcome"]["status"]) for each in read_log(path)][-1] == ("shadow", "CANCELLED")


class ByArtifact(RoutingPolicy):
    """Answers with the model that an artifact names."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept("chooser", "chooser", lambda artifact: str(artifact.settings["model"]))

    def check(self, models: ModelPool) -> None:
        self.kept.get(models, "policy.params.artifact")

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        await asked.read(models)
        model, version = self.kept.get(models, "policy.params.artifact")
        return Decision("plain", {"model": model}, "by_artifact", version)


def chooser(pool: LocalPool, model: str, kind: str = "chooser", digest: str | None = None) -> Artifact:
    digests = {role: digest or pool.engines[name].digest for role, name in pool.roles.items()}
    return Artifact(kind, "test", {"model": model}, digests, {"weight": torch.zeros(1)})


async def test_a_swapped_artifact_takes_effect_at_the_next_request(opened: Opened, tmp_path: Path) -> None:
    pool = opened({"policy": STATIC}, artifacts=str(tmp_path))
    assert pool.routing is not None
    path = tmp_path / "chooser.safetensors"
    artifacts = {model: chooser(pool, model) for model in ("small", "large")}
    artifacts["small"].save(path)
    policy = ByArtifact()
    pool.routing.router = Router(policy)
    expected = {model: (await ask(pool, PROMPT, "plain", {"model": model}, ignore_eos=True)).ids for model in artifacts}
    running = [asyncio.create_task(ask_auto(pool, ignore_eos=True)) for _ in range(6)]
    while not pool.engines["small"].batcher.tables:
        await asyncio.sleep(0)
    for turn in range(6):
        model = ("large", "small")[turn % 2]
        artifacts[model].save(path)
        reply = await ask_auto(pool, ignore_eos=True)
        assert reply.usage.route is not None
        assert (reply.usage.params["model"], reply.usage.route["version"]) == (model, artifacts[model].version)
        running.append(asyncio.create_task(ask_auto(pool, ignore_eos=True)))
    for reply in await asyncio.gather(*running):
        model = str(reply.usage.params["model"])
        assert reply.ids == expected[model]
        assert reply.usage.route is not None
        assert reply.usage.route["version"] == artifacts[model].version


async def test_a_bad_replacement_changes_nothing_and_a_bad_first_one_is_refused(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = opened({"policy": STATIC}, artifacts=str(tmp_path))
    assert pool.routing is not None
    path = tmp_path / "chooser.safetensors"
    policy = ByArtifact()
    chooser(pool, "small", digest="of another pair").save(path)
    with pytest.raises(TurnoutError, match=r"policy\.params\.artifact: was made for the large model with digest"):
        policy.check(pool.pool)
    good = chooser(pool, "small")
    good.save(path)
    policy.check(pool.pool)
    pool.routing.router = Router(policy)
    other = chooser(pool, "large", digest="of another pair")
    for spoil in (lambda: path.write_bytes(b"half a file"), lambda: other.save(path), path.unlink):
        spoil()
        for _ in range(2):
            reply = await ask_auto(pool)
            assert reply.usage.route is not None
            assert (reply.usage.params["model"], reply.usage.route["version"]) == ("small", good.version)
    assert len([record for record in caplog.records if "going on with version" in record.message]) == 3


async def test_an_artifact_of_another_pair_is_refused_at_start(pair_folder: Path, tmp_path: Path) -> None:
    models = {"small": "another", "large": "another"}
    Artifact("switch_calibration", "test", {}, models, {}).save(tmp_path / "curve.safetensors")
    for name, says in (("curve", "was made for the large model"), ("none", "is not known; available: curve")):
        policy = {"name": "budget", "params": {"calibrations": [name]}}
        with pytest.raises(TurnoutError, match=says) as caught:
            LocalPool.load("pair", routed_config(pair_folder, {"policy": policy}, artifacts=str(tmp_path)))
        assert caught.value.field == "pools.pair.routing.policy.params.calibrations.0"


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
