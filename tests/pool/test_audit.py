"""The losslessness audit: what is right passes, a planted wrong token is found, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from decoding.verifiers.match import MatchVerifier
from pool import audit
from pool.local_pool import LocalPool
from tests.engine.harness import answer, ask, ask_all, call_of, pair_config, random_prompts
from tests.pool.resuming import finish, had
from turnout.part_choice import PartChoice
from turnout.pool_stats import AuditStats
from turnout.telemetry_config import AuditConfig, TelemetryConfig

PROMPT = [65, 66, 67, 68, 69]
DRAFTED = {"drafter": "model_chain", "length": "fixed"}


class Opened:
    """Opens pools whose answers are audited; closes them, and looks that nothing is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: list[LocalPool] = []

    def __call__(self, **options: Any) -> LocalPool:
        config = pair_config(self.folder, block_size=8, token_budget=48)
        telemetry = TelemetryConfig(audit=AuditConfig(**{"share": 1.0, **options}))
        self.pools.append(LocalPool.load("pair", config.model_copy(update={"telemetry": telemetry})))
        return self.pools[-1]


@pytest.fixture
async def opened(pair_folder: Path) -> AsyncIterator[Opened]:
    factory = Opened(pair_folder)
    yield factory
    for pool in factory.pools:
        stats = pool.stats()
        assert (stats.requests, stats.sequences, stats.used_blocks, stats.waiting) == (0, 0, 0, 0)
        await pool.close()


async def settled(pool: LocalPool) -> AuditStats:
    """What audits found, when none is left."""
    async with asyncio.timeout(60):
        while (stats := stats_of(pool)).running:
            await asyncio.sleep(0)
    return stats


def stats_of(pool: LocalPool) -> AuditStats:
    stats = pool.stats().audit
    assert stats is not None
    return stats


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "plain", "params": {}},
        {"method": "plain", "params": {"model": "small"}},
        {"method": "speculative", "params": {}},
        {"method": "speculative", "params": {}, "temperature": 1.0, "n": 3, "top_p": 0.9},
        {"method": "speculative", "params": {}, "temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {70: 2.0}},
    ],
    ids=lambda asked: f"{asked['method']}-{len(asked)}",
)
async def test_right_answers_pass(opened: Opened, asked: dict[str, Any]) -> None:
    pool = opened()
    options = {key: value for key, value in asked.items() if key not in ("method", "params")}
    replies = [
        await ask(pool, prompt, asked["method"], asked["params"], max_tokens=100, ignore_eos=True, **options)
        for prompt in random_prompts(3, 30)
    ]
    stats = await settled(pool)
    assert (stats.equal + stats.ties, stats.mismatches, stats.dropped, stats.failed) == (
        3 * options.get("n", 1), 0, 0, 0,
    )  # fmt: skip
    assert stats.tokens == sum(len(tokens) for reply in replies for tokens in reply.answers)


@pytest.mark.parametrize(
    "processor", [{"name": "mirostat", "tau": 1.0, "eta": 0.9}, {"name": "dynamic_focus", "sigma": 0.02}]
)
async def test_answers_under_processors_that_read_more_than_logits_are_left_out(
    opened: Opened, processor: dict[str, Any]
) -> None:
    """What an audit reads has no surprises, and no states: it would find faults where there are none."""
    pool = opened()
    chosen = (PartChoice.model_validate(processor),)
    for prompt in random_prompts(3, 30):
        await ask(pool, prompt, "plain", {}, max_tokens=60, ignore_eos=True, temperature=1.0, processors=chosen)
    stats = await settled(pool)
    assert (stats.equal + stats.ties, stats.mismatches, stats.tokens) == (0, 0, 0)


WRONG_AT = 3
judge = MatchVerifier.judge


def judge_carelessly(self: MatchVerifier, seq: Sequence, draft: DraftTree, rows: Any, target: str) -> VerifyResult:
    """Lets a drafted token pass at one place, whatever the model says: the fault that an audit is there to find."""
    verdict = judge(self, seq, draft, rows, target)
    start = len(PROMPT) + WRONG_AT - len(seq)
    if not 0 <= start < len(verdict.tokens):
        return verdict
    wrong = verdict.tokens[start]._replace(id=(verdict.tokens[start].id + 1) % 200)
    return VerifyResult(verdict.path[:start], (*verdict.tokens[:start], wrong))


async def test_a_planted_wrong_token_is_found_and_shown(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = opened()
    right = await ask(pool, PROMPT, "plain", ignore_eos=True)
    assert (await settled(pool)).mismatches == 0
    monkeypatch.setattr(MatchVerifier, "judge", judge_carelessly)
    call = replace(call_of(PROMPT, "speculative", DRAFTED, ignore_eos=True), request_id="guilty")
    wrong = [token.id for token in (await answer(pool, call)).tokens]
    assert wrong[:3] == right.ids[:3]
    assert wrong[3] == (right.ids[3] + 1) % 200
    stats = await settled(pool)
    assert (stats.mismatches, stats.equal, stats.ties) == (1, 1, 0)
    (diff,) = stats.last
    assert (diff.request_id, diff.method, diff.answer, diff.position) == ("guilty", "speculative", 0, 3)
    assert (diff.wrote[0], diff.expected[0], diff.model) == (wrong[3], right.ids[3], "large")
    assert diff.margin_nats > 1e-3
    assert diff.wrote[1] == pool.tokenizer.name_of(wrong[3])


async def test_what_rounding_may_decide_is_a_tie(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = opened(tie_nats=1000.0)
    monkeypatch.setattr(MatchVerifier, "judge", judge_carelessly)
    await ask(pool, PROMPT, "speculative", DRAFTED, ignore_eos=True)
    stats = await settled(pool)
    assert (stats.ties, stats.mismatches) == (1, 0)


@pytest.mark.parametrize(
    ("method", "params", "options"),
    [
        ("entropy_adaptive", {"threshold": 4.0}, {}),
        ("speculative", {"verifier": "rejection"}, {"temperature": 1.0}),
        ("best_of", {}, {"temperature": 1.0}),
    ],
)
async def test_answers_that_need_not_be_equal_are_left_alone(
    opened: Opened, method: str, params: dict[str, Any], options: dict[str, Any]
) -> None:
    pool = opened()
    await ask(pool, PROMPT, method, params, **options)
    stats = stats_of(pool)
    assert (stats.running, stats.tokens) == (0, 0)


async def test_a_lossy_cache_and_an_answer_that_came_from_elsewhere_are_left_alone(opened: Opened) -> None:
    pool = opened()
    call = call_of(PROMPT, "plain", max_tokens=8, ignore_eos=True)
    whole = await answer(pool, call)
    assert (await settled(pool)).tokens == 8
    await answer(pool, replace(call, cache="lossy"))
    await finish(pool, call, had(pool, call, whole.ids, 3))
    stats = stats_of(pool)
    assert (stats.running, stats.tokens) == (0, 8)


async def test_a_share_is_audited(opened: Opened) -> None:
    pool = opened(share=0.0)
    await ask_all(pool, [call_of(prompt, "plain") for prompt in random_prompts(5, 20)])
    assert stats_of(pool) == AuditStats()


async def test_audits_wait_while_requests_are_in_progress(opened: Opened) -> None:
    pool = opened()
    await ask(pool, PROMPT, "plain")
    assert stats_of(pool).running == 1
    # A request that comes now finds the model free, and the audit where it was.
    running = pool.generate(call_of([1, 2, 3], "plain", max_tokens=60, ignore_eos=True))
    await anext(running)
    looked_at = stats_of(pool).tokens
    async for _ in running:
        assert stats_of(pool).tokens == looked_at
    stats = await settled(pool)
    assert (stats.equal + stats.ties, stats.mismatches) == (2, 0)


async def test_more_than_wait_are_dropped_and_counted(opened: Opened) -> None:
    pool = opened(max_waiting=1, max_running=1)
    # Together: none of their audits can begin before the last one has been answered.
    await ask_all(pool, [call_of(prompt, "plain") for prompt in random_prompts(6, 20)])
    stats = await settled(pool)
    assert stats.dropped >= 1
    assert stats.equal + stats.ties + stats.dropped == 6


async def test_an_audit_that_takes_too_long_is_dropped(opened: Opened) -> None:
    pool = opened(timeout_s=1e-6)
    await ask(pool, PROMPT, "plain")
    stats = await settled(pool)
    assert (stats.dropped, stats.equal, stats.failed) == (1, 0, 0)


async def test_an_audit_that_fails_is_counted(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = opened()

    async def fails(*_: Any) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(audit.Audits, "_look", fails)
    await ask(pool, PROMPT, "plain")
    assert (await settled(pool)).failed == 1


async def test_no_audit_is_in_the_usage_of_anybody(opened: Opened) -> None:
    pool = opened()
    first = await ask(pool, PROMPT, "plain", ignore_eos=True)
    await settled(pool)
    again = await ask(pool, [9, *PROMPT], "plain", ignore_eos=True)
    await settled(pool)
    assert first.usage.models["large"].forwards == again.usage.models["large"].forwards
    assert sum(meter.generated_tokens for meter in again.usage.models.values()) == len(again.ids)


async def test_a_server_that_is_never_idle_looks_at_some_of_its_answers(opened: Opened) -> None:
    pool = opened(floor_s=0.001, max_waiting=0)
    busy = pool.generate(call_of([1, 2, 3], "plain", max_tokens=400, ignore_eos=True))
    await anext(busy)
    reading = asyncio.create_task(anext(busy))
    async with asyncio.timeout(60):
        while not stats_of(pool).equal + stats_of(pool).ties:
            await ask(pool, PROMPT, "plain", max_tokens=2)
            # The first one owes, and waits: it is never idle here. A later one is due.
            assert pool.stats().requests == 1
    stats = stats_of(pool)
    assert (stats.mismatches, stats.failed) == (0, 0)
    await reading
    await busy.aclose()
    await settled(pool)


async def test_between_two_audits_that_are_due_the_others_wait(opened: Opened) -> None:
    pool = opened(floor_s=3600.0)
    busy = pool.generate(call_of([1, 2, 3], "plain", max_tokens=200, ignore_eos=True))
    await anext(busy)
    for _ in range(3):
        await ask(pool, PROMPT, "plain", max_tokens=2)
    assert (stats_of(pool).tokens, stats_of(pool).running) == (0, 3)
    async for _ in busy:
        assert stats_of(pool).tokens == 0
    assert (await settled(pool)).mismatches == 0
