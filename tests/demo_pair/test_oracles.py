"""The papers' oracles on the shipped pair: #002 (1)-(4), (6), (7), #111 G and S, #202, seeded equality."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pool.local_pool import LocalPool
from tests.demo_pair.conftest import Reply, _opened, assert_same_answers, demo_config, demo_reference
from tests.engine.margin import assert_best
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout, is_correct
from turnout.calls import ChatMessage
from turnout.cost import paper_cost
from turnout.types import TokenKind

# One loop for all: the models' locks belong to it.
pytestmark = pytest.mark.asyncio(loop_scope="module")

SWITCHING = {"window": 2, "min_stay": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[LocalPool]:
    async for opened in _opened(demo_config()):
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def twins() -> AsyncIterator[LocalPool]:
    """The large model in both roles."""
    async for opened in _opened(demo_config(small="demo:large")):
        yield opened


def as_new(pool: LocalPool) -> LocalPool:
    """An idle pool in which nothing is cached."""
    assert pool.stats().used_blocks == 0
    for engine in pool.engines.values():
        engine.pool.clear_cached()
    return pool


@pytest.fixture
def pool(pair: LocalPool) -> LocalPool:
    return as_new(pair)


@pytest.fixture
def twin_pool(twins: LocalPool) -> LocalPool:
    return as_new(twins)


def encode(pool: LocalPool, prompt: str) -> list[int]:
    return pool.tokenizer.encode_chat((ChatMessage("user", prompt),))


def assert_greedy_of_claimants(pool: LocalPool, reply: Reply) -> None:
    """Every token is, but for ties, the arg-max of the model that claims it, by a fresh plain forward."""
    prompt = encode(pool, reply.prompt)
    scores = {role: demo_reference(role).scores(prompt, reply.ids, reply.sampling, 0) for role in ("small", "large")}
    for place, token in enumerate(reply.tokens):
        assert_best(token.id, scores[token.source][place], f"token {place} by {token.source}")


async def test_same_weights_with_forced_switches_equal_one_model(
    twin_pool: LocalPool, ask_all: Any, prompts: list[str]
) -> None:
    alone = await ask_all(twin_pool, prompts[:40])
    for catch_up in ("lazy", "eager", "shadow"):
        params = {"threshold": 0.005, "catch_up": catch_up, **SWITCHING}
        switched = await ask_all(twin_pool, prompts[:40], "entropy_adaptive", params)
        assert sum(reply.usage.switches for reply in switched) > 40
        assert_same_answers(twin_pool, alone, switched, decided_by="large")


async def test_threshold_extremes(pool: LocalPool, ask_all: Any, prompts: list[str]) -> None:
    small = await ask_all(pool, prompts[:20], "plain", {"model": "small"})
    never = await ask_all(pool, prompts[:20], "entropy_adaptive", {"threshold": 64.0})
    assert_same_answers(pool, small, never)
    always = await ask_all(pool, prompts[:20], "entropy_adaptive", {"threshold": -1.0, "min_stay": 4})
    for reply in always:
        owners = [token.source for token in reply.tokens]
        assert owners == ["small"] * 4 + ["large"] * (len(owners) - 4)


@pytest.mark.parametrize("effect", ["next", "current"])
async def test_every_token_is_its_claimants_choice_and_runs_are_long_enough(
    pool: LocalPool, ask_all: Any, prompts: list[str], effect: str
) -> None:
    params = {"threshold": 0.3, "effect": effect, "window": 3, "min_stay": 5}
    replies = await ask_all(pool, prompts[:12], "entropy_adaptive", params)
    assert sum(reply.usage.switches for reply in replies) > 10
    for reply in replies:
        assert_greedy_of_claimants(pool, reply)
        assert all(length >= 5 for _, length in reply.runs[:-1])


async def test_without_a_stay_the_small_model_writes_nothing_that_it_is_unsure_of(
    pool: LocalPool, ask_all: Any, prompts: list[str]
) -> None:
    """And its answers are the large model's own, which they are not where it must stay."""
    free = {"threshold": 0.1, "effect": "current", "window": 1, "min_stay": 1, "min_stay_small": 0}
    alone = await ask_all(pool, prompts[:12])
    same, shares = [], []
    for params in ({**free, "effect_back": "next"}, free, {**free, "min_stay_small": 6}):
        replies = await ask_all(pool, prompts[:12], "entropy_adaptive", params)
        tokens = [token for reply in replies for token in reply.tokens]
        for reply in replies:
            assert_greedy_of_claimants(pool, reply)
        unsure = [token for token in tokens if token.source == "small" and (token.entropy_bits or 0.0) > 0.1]
        assert bool(unsure) == (params["min_stay_small"] == 6)
        same.append(sum(reply.text == own.text for reply, own in zip(replies, alone, strict=True)))
        shares.append(sum(token.source == "large" for token in tokens) / len(tokens))
    assert min(same[:2]) > same[2]
    assert max(shares[:2]) < 0.3


async def test_meters_add_up(pool: LocalPool, ask_all: Any, prompts: list[str]) -> None:
    replies = await ask_all(pool, prompts[:12], "entropy_adaptive", {"threshold": 0.3, **SWITCHING})
    sizes = {name: engine.num_parameters for name, engine in pool.engines.items()}
    for reply in replies:
        by_large = sum(token.source == "large" for token in reply.tokens)
        share = by_large / len(reply.tokens)
        cost = reply.usage.cost
        assert cost.large_share == pytest.approx(share)
        assert cost.spent.paper == pytest.approx(paper_cost(share, sizes["small"], sizes["large"]))
        for name, meter in reply.usage.models.items():
            assert meter.generated_tokens == sum(token.source == name for token in reply.tokens)
            processed = meter.prompt_tokens + meter.catchup_tokens + meter.decode_tokens + meter.draft_tokens
            assert meter.flops == 2.0 * sizes[name] * processed
            # Nobody reads a token twice, and the last one is never read.
            assert meter.cached_tokens + processed <= reply.usage.prompt_tokens + len(reply.tokens) - 1
            assert meter.draft_tokens == 0


async def test_quality_and_share_fall_as_the_threshold_rises(pool: LocalPool, ask_all: Any) -> None:
    problems = heldout(MIDDLE_DIFFICULTY, 80, seed=5)
    texts = [problem.prompt for problem in problems]
    shares, rights = [], []
    for threshold in (-1.0, 0.15, 0.6, 64.0):
        params = {"threshold": threshold, "start": "large" if threshold < 0 else "small", **SWITCHING}
        replies = await ask_all(pool, texts, "entropy_adaptive", params)
        tokens = sum(len(reply.tokens) for reply in replies)
        shares.append(sum(t.source == "large" for reply in replies for t in reply.tokens) / tokens)
        rights.append(sum(is_correct(p, reply.text) for p, reply in zip(problems, replies, strict=True)))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[-1] == 0.0
    assert rights[0] > rights[-1]
    assert all(rights[-1] - 4 <= right <= rights[0] + 4 for right in rights)


async def test_speculation_keeps_greedy_output(pool: LocalPool, ask_all: Any, prompts: list[str]) -> None:
    plain = await ask_all(pool, prompts)
    for verifier in ("match", "rejection"):
        params = {"verifier": verifier, "length": "fixed", "draft_length": 5}
        replies = await ask_all(as_new(pool), prompts, "speculative", params)
        assert len(replies) >= 100
        assert_same_answers(pool, plain, replies)
        assert sum(reply.usage.speculation.accepted_tokens for reply in replies) > 0


async def test_a_draft_by_the_same_weights_is_always_accepted(
    twin_pool: LocalPool, ask_all: Any, prompts: list[str]
) -> None:
    replies = await ask_all(
        twin_pool,
        prompts[:20],
        "speculative",
        {"length": "fixed", "draft_length": 4},
        temperature=1.0,
        max_tokens=50,
        ignore_eos=True,
    )
    for reply in replies:
        assert reply.usage.speculation.accepted_tokens == reply.usage.speculation.draft_tokens
        assert reply.usage.speculation.rounds == 10
        kinds = [token.kind for token in reply.tokens]
        assert kinds == ([TokenKind.ACCEPTED] * 4 + [TokenKind.BONUS]) * 10


async def test_seeded_sampling_does_not_depend_on_the_batch_or_the_drafter(
    pool: LocalPool, ask: Any, prompts: list[str]
) -> None:
    methods: list[tuple[str, dict[str, Any]]] = [
        ("plain", {"model": "large"}),
        ("plain", {"model": "small"}),
        ("speculative", {"verifier": "match", "length": "fixed", "draft_length": 3}),
        ("speculative", {"verifier": "rejection"}),
        ("entropy_adaptive", {"threshold": 0.3, **SWITCHING}),
        ("entropy_adaptive", {"threshold": 0.3, "catch_up": "shadow", "effect": "current", **SWITCHING}),
        ("sentence_lead", {"lead_tokens": 3}),
        ("random_switch", {"share": 0.5, "mean_run": 6.0, "min_stay": 2}),
    ]
    calls = [
        (prompts[i], *methods[i % len(methods)], {"seed": i, "temperature": 0.5 + i / 20, "max_tokens": 20 + 5 * i})
        for i in range(16)
    ]
    alone = [await ask(pool, prompt, name, params, **sampling) for prompt, name, params, sampling in calls]
    together = await asyncio.gather(
        *(ask(pool, prompt, name, params, **sampling) for prompt, name, params, sampling in calls)
    )
    for (prompt, name, params, sampling), before, after in zip(calls, alone, together, strict=True):
        if params.get("verifier") == "rejection":
            assert after.ids == before.ids  # no one score decides its tokens, so no tie is excused
            continue
        decided_by = "large" if name == "speculative" else ""
        assert_same_answers(pool, [before], [after], decided_by)
        if name == "speculative":
            plain = await ask(pool, prompt, "plain", {"model": "large"}, **sampling)
            assert_same_answers(pool, [plain], [before])


async def test_sentence_lead_extremes(pool: LocalPool, twin_pool: LocalPool, ask_all: Any, prompts: list[str]) -> None:
    small = await ask_all(pool, prompts[:12], "plain", {"model": "small"})
    large = await ask_all(pool, prompts[:12])
    draft_only = await ask_all(pool, prompts[:12], "sentence_lead", {"lead_probability": 0.0})
    leader_only = await ask_all(pool, prompts[:12], "sentence_lead", {"lead_tokens": 1000, "lead_probability": 1.0})
    assert_same_answers(pool, small, draft_only)
    assert_same_answers(pool, large, leader_only)
    mixed = await ask_all(twin_pool, prompts[:12], "sentence_lead", {"lead_tokens": 2, "lead_probability": 0.7})
    assert sum(reply.usage.switches for reply in mixed) > 12
    assert_same_answers(pool, large, mixed)


async def test_the_leaders_share_grows_with_its_tokens(pool: LocalPool, ask_all: Any, prompts: list[str]) -> None:
    shares = []
    for lead_tokens in (1, 3, 6):
        replies = await ask_all(pool, prompts[:20], "sentence_lead", {"lead_tokens": lead_tokens})
        tokens = [token for reply in replies for token in reply.tokens]
        shares.append(sum(token.source == "large" for token in tokens) / len(tokens))
    assert shares[0] < shares[1] < shares[2]
