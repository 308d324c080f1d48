"""The papers' oracles on random models behind the real engine: #111 G S K, #002 (1)-(3), (6), K, meters, #202."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters.base import Candidates, DraftBudget
from decoding.drafters.model_chain import ModelChainDrafter
from decoding.lengths.fixed import FixedLength
from decoding.model import ReadSpec
from decoding.sequence import Sequence
from decoding.verifiers.rejection import RejectionVerifier
from engine.model import EngineModel
from engine.runner import Feed
from pool.local_pool import LocalPool
from tests.engine.harness import (
    Reference,
    Reply,
    answer,
    ask_all,
    assert_claimed,
    call_of,
    random_prompts,
    reference,
)
from tests.engine.margin import assert_same_tokens
from turnout.calls import GenerateCall
from turnout.cost import paper_cost
from turnout.types import SamplingParams, TokenKind

SWITCHING = {"window": 2, "min_stay": 3, "threshold": 2.0}
CATCH_UPS = ("lazy", "eager", "shadow")


def greedy_scores(folder: Path, call: GenerateCall, expected: Reply, name: str = "large") -> Any:
    return lambda place: reference(folder / name).logits([*call.prompt, *expected.ids[:place]])[-1]


def assert_same(
    folder: Path, calls: list[GenerateCall], expected: list[Reply], got: list[Reply], **options: Any
) -> None:
    for call, mine, theirs in zip(calls, expected, got, strict=True):
        assert_same_tokens(mine.ids, theirs.ids, greedy_scores(folder, call, mine, **options), str(call.method))


def calls_of(prompts: list[list[int]], *args: Any, **options: Any) -> list[GenerateCall]:
    return [call_of(prompt, *args, **options) for prompt in prompts]


class Spy:
    """Counts what a model's forwards are really fed, by sequence, and checks cached keys and values on the way."""

    def __init__(self, model: EngineModel, plain: Reference | None = None) -> None:
        self.fed: Counter[Sequence] = Counter()
        self.forwards: Counter[Sequence] = Counter()
        self.max_behind = 0.0
        self.catch_ups = 0
        self._plain = plain
        self._original = model.batcher.runner.run
        model.batcher.runner.run = self.run  # type: ignore[method-assign]

    def run(self, feeds: list[Feed]) -> Any:
        for feed in feeds:
            self.fed[feed.table.seq] += len(feed.tokens)
            self.forwards[feed.table.seq] += 1
            self.catch_ups += len(feed.table) > feed.table.seq.num_prompt_tokens and len(feed.tokens) > 1
            if self._plain is not None:
                for _, _, want in feed.reads:
                    object.__setattr__(want, "logits", True)
        rows = self._original(feeds)
        if self._plain is not None:
            for feed, read in zip(feeds, rows, strict=True):
                for (_, history, _), row in zip(feed.reads, read, strict=True):
                    fresh = self._plain.logits([*history.seq.tokens, *history.path])[-1]
                    self.max_behind = max(self.max_behind, float((row.logits - fresh).abs().max()))
        return rows


@pytest.mark.parametrize("verifier", ["match", "rejection"])
async def test_speculation_keeps_greedy_output(pool: LocalPool, pair_folder: Path, verifier: str) -> None:
    prompts = random_prompts(100, 12, seed=21)
    plain = await ask_all(pool, calls_of(prompts, "plain", max_tokens=8))
    calls = calls_of(prompts, "speculative", {"verifier": verifier, "length": "fixed", "draft_length": 3}, max_tokens=8)
    replies = await ask_all(pool, calls)
    assert_same(pair_folder, calls, plain, replies)
    drafted = sum(reply.usage.speculation.draft_tokens for reply in replies)
    assert 0 < sum(reply.usage.speculation.accepted_tokens for reply in replies) < drafted


@pytest.mark.parametrize(("verifier", "temperature"), [("match", 1.0), ("match", 0.0), ("rejection", 0.0)])
async def test_a_draft_by_the_same_weights_is_always_accepted(
    twin_pool: LocalPool, verifier: str, temperature: float
) -> None:
    params = {"length": "fixed", "draft_length": 4, "verifier": verifier}
    prompts = random_prompts(12, 40, seed=22)
    calls = calls_of(prompts, "speculative", params, temperature=temperature, max_tokens=30, ignore_eos=True)
    for reply in await ask_all(twin_pool, calls):
        assert reply.usage.speculation.accepted_tokens == reply.usage.speculation.draft_tokens == 24
        assert reply.usage.speculation.rounds == 6
        assert [token.kind for token in reply.tokens] == ([TokenKind.ACCEPTED] * 4 + [TokenKind.BONUS]) * 6
        meters = reply.usage.models
        assert meters["large"].decode_tokens == 5
        assert meters["large"].draft_tokens == 24
        # After a round that accepted everything the drafter reads its own last token and the bonus.
        assert (meters["small"].catchup_tokens, meters["small"].decode_tokens) == (5, 5)


async def test_rejection_accepts_all_but_rounding_from_the_same_weights_when_sampling(twin_pool: LocalPool) -> None:
    calls = calls_of(
        random_prompts(12, 40, seed=23),
        "speculative",
        {"verifier": "rejection"},
        temperature=1.0,
        max_tokens=40,
        ignore_eos=True,
    )
    replies = await ask_all(twin_pool, calls)
    drafted = sum(reply.usage.speculation.draft_tokens for reply in replies)
    assert drafted - sum(reply.usage.speculation.accepted_tokens for reply in replies) <= 1
    assert drafted > 300


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("speculative", {"verifier": "match", "length": "fixed", "draft_length": 5}),
        ("speculative", {"verifier": "rejection", "length": "fixed", "draft_length": 3}),
        ("entropy_adaptive", {**SWITCHING, "catch_up": "lazy"}),
        ("entropy_adaptive", {**SWITCHING, "catch_up": "shadow", "effect": "current"}),
        ("sentence_lead", {"lead_tokens": 2}),
    ],
)
async def test_every_row_read_equals_a_fresh_prefill(
    pool: LocalPool, pair_folder: Path, method: str, params: dict[str, Any]
) -> None:
    spies = [Spy(pool.engines[name], reference(pair_folder / name)) for name in ("small", "large")]
    await ask_all(pool, calls_of(random_prompts(6, 40, seed=24), method, params, temperature=0.9, max_tokens=30))
    assert max(spy.max_behind for spy in spies) < 1e-4
    assert sum(spy.catch_ups for spy in spies) > 0


async def test_same_weights_with_forced_switches_equal_one_model(twin_pool: LocalPool, pair_folder: Path) -> None:
    prompts = random_prompts(20, 30, seed=25)
    alone = await ask_all(twin_pool, calls_of(prompts, "plain", max_tokens=30))
    for catch_up in CATCH_UPS:
        calls = calls_of(prompts, "entropy_adaptive", {**SWITCHING, "catch_up": catch_up}, max_tokens=30)
        switched = await ask_all(twin_pool, calls)
        assert sum(reply.usage.switches for reply in switched) > 20
        assert_same(pair_folder, calls, alone, switched)


async def test_threshold_extremes(pool: LocalPool, pair_folder: Path) -> None:
    prompts = random_prompts(8, 30, seed=26)
    small = await ask_all(pool, calls_of(prompts, "plain", {"model": "small"}))
    calls = calls_of(prompts, "entropy_adaptive", {"threshold": 64.0})
    never = await ask_all(pool, calls)
    assert_same(pair_folder, calls, small, never, name="small")
    assert all(set(reply.usage.models) == {"small"} for reply in never)
    calls = calls_of(prompts, "entropy_adaptive", {"threshold": -1.0, "min_stay": 4}, ignore_eos=True)
    always = await ask_all(pool, calls)
    for reply in always:
        owners = [token.source for token in reply.tokens]
        assert owners == ["small"] * 4 + ["large"] * (len(owners) - 4)


@pytest.mark.parametrize("effect", ["next", "current"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_token_is_its_claimants_choice_however_the_idle_model_catches_up(
    pool: LocalPool, pair_folder: Path, effect: str, temperature: float
) -> None:
    prompts = random_prompts(8, 40, seed=27)
    answers = []
    for catch_up in CATCH_UPS:
        params = {**SWITCHING, "effect": effect, "catch_up": catch_up}
        calls = calls_of(prompts, "entropy_adaptive", params, max_tokens=30, temperature=temperature)
        replies = await ask_all(pool, calls)
        assert sum(reply.usage.switches for reply in replies) > 8
        for call, reply in zip(calls, replies, strict=True):
            assert_claimed(pair_folder, call, reply)
            assert all(length >= SWITCHING["min_stay"] for _, length in reply.runs[:-1])
        answers.append([[(token.id, token.source) for token in reply.tokens] for reply in replies])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("plain", {}),
        ("speculative", {"length": "fixed", "draft_length": 3}),
        (
            "speculative",
            {"drafter": {"name": "swift", "skipped": 0.9, "context": 4}, "length": "fixed"},
        ),  # and the forwards of its search
        ("entropy_adaptive", {**SWITCHING, "catch_up": "lazy"}),
        ("entropy_adaptive", {**SWITCHING, "catch_up": "eager"}),
        ("entropy_adaptive", {**SWITCHING, "catch_up": "shadow", "effect": "current"}),
        ("random_switch", {"share": 0.5, "mean_run": 4.0, "min_stay": 2}),
    ],
)
async def test_every_fed_token_is_metered_once(pool: LocalPool, method: str, params: dict[str, Any]) -> None:
    spies = {name: Spy(engine) for name, engine in pool.engines.items()}
    prompts = random_prompts(6, 60, seed=28)
    for prompt in prompts:
        reply = await answer(pool, call_of(prompt, method, params, max_tokens=24, ignore_eos=True))
        for name, spy in spies.items():
            meter = reply.usage.models.get(name)
            fed = spy.fed.total()
            assert fed == (meter.processed_tokens if meter else 0)
            assert spy.forwards.total() == (meter.forwards if meter else 0)
            spy.fed.clear()
            spy.forwards.clear()
            if meter is None:
                continue
            assert meter.generated_tokens == sum(token.source == name for token in reply.tokens)
            assert ("drafter" in params and name == "large") == (meter.spared_tokens > 0)  # by layers that swift skips
            assert meter.flops == pytest.approx(2.0 * meter.num_parameters * (fed - meter.spared_tokens))
            if fed and "drafter" not in params:  # one by the target's own layers reads the prompt's last token, too
                assert meter.prompt_tokens + meter.cached_tokens == len(prompt)
            if method != "speculative":
                assert meter.draft_tokens == 0
                # Nobody reads a token twice, and the last one is never read.
                assert meter.catchup_tokens + meter.decode_tokens <= len(reply.tokens) - 1
            if method == "plain":
                assert (meter.catchup_tokens, meter.decode_tokens) == (0, 23)


async def test_the_papers_cost_charges_generated_tokens_only(pool: LocalPool) -> None:
    sizes = {name: engine.num_parameters for name, engine in pool.engines.items()}
    calls = calls_of(random_prompts(6, 30, seed=29), "entropy_adaptive", SWITCHING, max_tokens=30)
    for reply in await ask_all(pool, calls):
        share = sum(token.source == "large" for token in reply.tokens) / len(reply.tokens)
        assert reply.usage.cost.large_share == pytest.approx(share)
        assert reply.usage.cost.spent.paper == pytest.approx(paper_cost(share, sizes["small"], sizes["large"]))
        large_tokens = reply.usage.prompt_tokens + len(reply.tokens) - 1
        assert reply.usage.cost.large_only.flops == 2.0 * sizes["large"] * large_tokens


async def test_sentence_lead_extremes(pool: LocalPool, twin_pool: LocalPool, pair_folder: Path) -> None:
    prompts = random_prompts(10, 20, seed=30)
    small = await ask_all(pool, calls_of(prompts, "plain", {"model": "small"}, max_tokens=24))
    large = await ask_all(pool, calls_of(prompts, "plain", max_tokens=24))
    calls = calls_of(prompts, "sentence_lead", {"lead_probability": 0.0}, max_tokens=24)
    assert_same(pair_folder, calls, small, await ask_all(pool, calls), name="small")
    calls = calls_of(prompts, "sentence_lead", {"lead_tokens": 1000, "lead_probability": 1.0}, max_tokens=24)
    assert_same(pair_folder, calls, large, await ask_all(pool, calls))
    calls = calls_of(prompts, "sentence_lead", {"lead_tokens": 2, "lead_probability": 0.7}, max_tokens=24)
    mixed = await ask_all(twin_pool, calls)
    assert sum(reply.usage.switches for reply in mixed) > 5
    assert_same(pair_folder, calls, large, mixed)


async def test_rolled_back_drafts_leave_both_caches_right(pool: LocalPool, pair_folder: Path) -> None:
    seq = Sequence(random_prompts(1, 30, seed=31)[0], SamplingParams(temperature=1.0, max_tokens=60), seed=5)
    drafter, verifier = ModelChainDrafter(candidates=Candidates.DRAWN), RejectionVerifier()
    rejected = 0
    while not seq.finished:
        draft = await pool.model_pool.small.propose(seq, drafter, DraftBudget(4, 4), FixedLength())
        verdict = await pool.model_pool.large.verify(seq, draft, verifier)
        rejected += len(draft) - len(verdict.path)
        seq.extend(verdict.tokens, pool.model_pool.sizes)
        for name, engine in pool.engines.items():
            table = engine.batcher.tables[seq]
            probe = table.fork(Sequence([*table.tokens, 9], SamplingParams(), 0))
            agreed = probe.reconcile()
            assert probe.tokens == table.tokens[:agreed]
            engine.batcher.tables[probe.seq] = probe
            rows = await engine.extend(probe.seq, want=ReadSpec(draw=None, logits=True))
            fresh = reference(pair_folder / name).logits(probe.seq.tokens)[-1]
            torch.testing.assert_close(rows[0].logits, fresh, atol=1e-4, rtol=0)
            engine.release(probe.seq)
    assert rejected > 10
    for engine in pool.engines.values():
        engine.release(seq)


async def test_a_lossy_verifier_is_said_to_be_one(pool: LocalPool) -> None:
    for verifier, notes in (
        ("match", ()),
        ("typical", ("not lossless: speculative with these parameters has a law of its own",)),
    ):
        calls = calls_of(
            random_prompts(1, 40, seed=3), "speculative", {"length": "fixed", "verifier": verifier}, max_tokens=4
        )
        [reply] = await ask_all(pool, calls)
        assert reply.usage.notes == notes
