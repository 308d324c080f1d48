"""The soak, shortened; and that it would notice what it is there to notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from benchmarks.soak import UNLOADED, Outcome, Traffic, growth, leaks, page, soak
from decoding.sequence import Sequence
from experiments.replay import Verdict, answer, compare
from pool.local_pool import LocalPool
from turnout.config import TurnoutConfig
from turnout.types import SamplingParams


@pytest.fixture
async def pool() -> AsyncIterator[LocalPool]:
    demo = TurnoutConfig.demo()
    models = {name: model.model_copy(update={"dtype": "float32"}) for name, model in demo.models.items()}
    loaded = LocalPool.load("demo", demo.model_copy(update={"models": models}))
    yield loaded
    await loaded.close()


@pytest.mark.drivers
async def test_a_short_soak_passes(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine there are few calls: some of them must be given up.
    monkeypatch.setattr("benchmarks.soak.TENANTS", dict.fromkeys(("alpha", "beta", "gamma"), 1 / 3))
    monkeypatch.setattr("benchmarks.soak.CANCELLED_SHARE", 0.4)
    report = await soak(pool, seconds=6.0, sample=10, seed=3)
    assert report.failures == []
    assert report.outcomes["finished"] > 0
    assert sum(report.compared.values()) == min(report.outcomes["finished"], 10)
    assert sum(report.compared.values()) - report.compared[Verdict.EQUAL.value] <= 1
    assert 0.0 < report.forward_share < 1.0
    assert set(report.median_seconds) <= {"alpha", "beta", "gamma"}


async def test_a_wrong_token_is_noticed(pool: LocalPool) -> None:
    traffic = Traffic(pool, seed=1)
    verdicts = Counter[Verdict]()
    for _ in range(3):
        call = traffic.call()
        tokens = await answer(pool, call)
        verdicts[await compare(pool, call, tokens)] += 1
        place = len(tokens) // 2
        other = replace(tokens[place], id=(tokens[place].id + 1) % pool.vocab_size)
        assert await compare(pool, call, [*tokens[:place], other, *tokens[place + 1 :]]) is Verdict.WRONG
        assert await compare(pool, call, tokens[:-1]) is Verdict.WRONG
    assert verdicts == {Verdict.EQUAL: 3}
    assert pool.stats().used_blocks == 0


async def test_what_is_left_behind_is_noticed(pool: LocalPool) -> None:
    assert leaks(pool) == []
    model = pool.engines["demo-small"]
    seq = Sequence([5, 6, 7], SamplingParams(), seed=0)
    await model.extend(seq)
    assert leaks(pool) == ["1 sequences are still held", "1 blocks are still held"]
    model.release(seq)
    model.pool._free.popitem()
    assert leaks(pool) == ["1 blocks are still held", "demo-small: a block is lost"]


def test_growth_is_that_of_the_trend_after_warm_up() -> None:
    warm_up = [(float(t), 500 + 10 * t) for t in range(30)]
    flat = [(float(t), 800 + (5 if t % 2 else -5)) for t in range(30, 101)]
    rising = [(float(t), 800 + 2 * (t - 30)) for t in range(30, 101)]
    assert abs(growth(warm_up + flat)) < 0.002
    assert growth(warm_up + rising) == pytest.approx(140 / 870)
    assert growth(warm_up[:2]) == 0.0


def test_every_kind_of_failure_is_reported() -> None:
    compared = {"equal": 30, "tie": 1}
    fine = Outcome(60.0, 9.0, (7.5, 8.0), {"finished": 500}, 700.0, {"alpha": 0.4}, 0.9, 2e9, 0.001, [], [], compared)
    assert fine.failures == []
    report = page(fine)
    assert "| verdict | passed |" in report.markdown()
    assert report.failures == []
    idle = replace(fine, capacity_per_s=(7.5, 9.1))
    assert page(idle).failures == [UNLOADED]
    assert "passed" not in page(idle).markdown()
    bad = replace(fine, growth=0.2, leaks=["2 blocks are still held"], faults=["plain: boom"], compared={"wrong": 3})
    assert bad.failures == [
        "2 blocks are still held",
        "plain: boom",
        "memory grew by 20.0% after warm-up",
        "3 answers differ from what their requests give alone",
    ]
