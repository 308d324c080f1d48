"""What a probe costs beside a request, and the samples that adaptive best-of-k needs, by hand and on the demo pair."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import bench_routing, routed_walls
from benchmarks.bench_routing import Clocked, Probed, Span, Timed, Trained, measure, page, sample_verdict
from benchmarks.best_of_samples import Needed, needed
from benchmarks.routed_walls import RoutedCost, routed_cost
from benchmarks.strategies import at_once
from decoding.model import ModelPool, Request
from decoding.sequence import Sequence
from experiments.grid.cells import Record
from experiments.stats.intervals import Interval
from pool.local_pool import LocalPool
from router.allocation import best_of
from router.base import Asked, RoutingPolicy
from router.decision import Decision
from router.difficulty.curve import NEVER
from turnout.calls import GenerateCall
from turnout.config import RoutingConfig
from turnout.types import SamplingParams

MOST = 8


def table(*chances: float) -> np.ndarray:
    """A hundred prompts of each chance of a right sample."""
    return np.repeat([[best_of(chance, k) for k in range(1, MOST + 1)] for chance in chances], 100, axis=0)


def test_samples_are_saved_where_they_are_known_to_bring_nothing() -> None:
    chances = np.repeat([1.0, 0.0, 0.5], 100)
    [two, three, *_] = needed(table(1.0, 0.0, 0.5), chances)
    assert (two.k, three.k) == (2, 3)
    assert two.answered.value == pytest.approx((1.0 + 0.0 + 0.75) / 3)
    # One sample for each of the sure and the hopeless; with 2 on average, 4 are left for a prompt of the others.
    # As many answers as 2 for each: between 1 sample (0.5) and 4 (0.9375), on a straight line.
    part = 1 + (0.75 - 0.5) / (0.9375 - 0.5)
    assert two.parts["predicted"].value == pytest.approx(part / 2)
    assert two.parts["oracle"].value == pytest.approx(part / 2)
    assert two.parts["predicted"].low < part / 2 < two.parts["predicted"].high
    assert three.parts["predicted"].value < two.parts["predicted"].value


def test_predictions_that_say_nothing_save_nothing() -> None:
    found = needed(table(0.9, 0.3), np.full(200, 0.5))
    assert [each.k for each in found] == list(range(2, MOST + 1))
    assert all(each.parts["predicted"].value == pytest.approx(1.0) for each in found)
    assert found[0].parts["oracle"].value < 0.95


def test_wrong_predictions_need_more_and_what_no_budget_reaches_is_not_guessed() -> None:
    wrong = needed(table(1.0, 0.5), np.repeat([0.5, 1.0], 100))
    assert np.isinf(wrong[0].parts["predicted"].value)
    assert sample_verdict("small model", wrong[0]) == (
        "- small model, k = 2: as many answers are not reached, where uniform answers 87.5% (one sample 75.0%);"
        " goal at most 60%: missed."
    )


def test_where_more_samples_bring_nothing_there_is_nothing_to_save() -> None:
    """One sample each does it there: a part of 1 / k that nobody earned."""
    [two, *_] = needed(table(1.0, 0.0), np.repeat([1.0, 0.0], 100))
    assert two.parts["predicted"].value == pytest.approx(0.5)
    assert not two.gains
    assert sample_verdict("large model", two).startswith("- large model, k = 2: not measured, because no prompt")


@pytest.mark.drivers
def test_the_answer_that_is_shown_is_counted_beside_the_one_that_is_there() -> None:
    """Samples are shared out by who may be right; a reranker that shows the first answer always gains nothing."""
    chances = np.repeat([1.0, 0.0, 0.5], 100)
    there = table(1.0, 0.0, 0.5)
    shown = np.repeat(there[:, :1], MOST, axis=1)
    [two, *_] = needed(there, chances, shown)
    assert two.gains
    assert two.shown is not None
    assert not two.shown.gains
    assert (two.answered.value, two.shown.answered.value) == (pytest.approx(1.75 / 3), pytest.approx(0.5))
    perfect = needed(there, chances, there)[0].shown
    assert perfect is not None
    assert perfect.parts == {way: two.parts[way] for way in ("predicted", "bins")}


class Clock:
    """Time that passes only where somebody works."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_a_decision_is_timed_without_the_reading_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(bench_routing, "time", clock)

    class Small:
        async def extend(self, seq: Sequence, want: Any) -> list[str]:
            clock.now += 2.0
            return ["row"]

    class Policy(RoutingPolicy):
        async def decide(self, asked: Asked, models: ModelPool) -> Decision:
            assert cast("str", await asked.read(models)) == "row"
            clock.now += 0.25
            return Decision("plain", {}, "policy", "v", {}, {})

    clocked = Clocked(Policy())
    asked = Asked(Request("r7", Sequence([1], SamplingParams(), 0)), "demo", "t", "", "question")
    asyncio.run(clocked.decide(asked, cast("ModelPool", SimpleNamespace(small=Small()))))
    assert clocked.spans == {"r7": Span(2.0, 0.25)}


def test_no_more_than_asked_for_are_at_work_at_once() -> None:
    running, most = 0, 0

    async def piece(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    assert asyncio.run(at_once((piece(number) for number in range(10)), 3)) == list(range(10))
    assert most == 3


def exact(value: float) -> Interval:
    return Interval(value, value, value)


@pytest.mark.parametrize(("share", "verdict"), [(0.01, "met"), (0.03, "missed")])
def test_the_page_judges_the_probe_and_the_samples(share: float, verdict: str) -> None:
    # What is judged is all that routing adds; decisions alone are far below.
    times = [Timed(RoutedCost(8, 30, 4, exact(share), 1.0), Probed(8, 30, exact(0.004), exact(0.2), 0.5, exact(0.1)))]
    rows = [
        Needed(
            k,
            0.4,
            exact(0.5),
            dict.fromkeys(("predicted", "bins", "oracle"), exact(20 * share)),
            Needed(k, 0.4, exact(0.45), dict.fromkeys(("predicted", "bins"), exact(0.55))) if k == 2 else None,
        )
        for k in (2, 3, 4)
    ]
    text = page(Trained((50, 10), {}, {}, {}), times, {"small": rows}).markdown()
    assert (
        f"- 8 at once: routing adds {share:.1%} [{share:.1%}, {share:.1%}] to the time of requests that the small model"
        f" answers (4 rounds of 30); goal at most 2%: {verdict}." in text
    )
    assert "- 8 at once: decisions alone take 0.4% [0.4%, 0.4%] of the requests' time." in text
    part = f"{20 * share:.1%}"
    samples = "met" if 20 * share <= 0.6 else "missed"
    one, shown = "- small model, one of k is right, k = ", "- small model, the one shown is right, k = "
    assert f"{one}2: {part} [{part}, {part}] of the samples, where uniform answers 50.0%" in text
    assert f"{shown}2: 55.0% [55.0%, 55.0%] of the samples, where uniform answers 45.0%" in text
    assert text.count(f"; goal at most 60%: {samples}.") == 1 + (samples == "met")
    assert f"{one}3" not in text
    assert text.count("\n| small | ") == len(rows)
    assert text.count(" | not known | not known | not known |") == 2


@pytest.mark.drivers
def test_a_router_is_trained_and_timed_on_the_demo_pair() -> None:
    trained, times = asyncio.run(measure(50, 2, 6, 1))
    total, held = trained.rows
    assert total >= 50
    assert {role: each.shape for role, each in trained.tables.items()} == {"small": (held, 2), "large": (held, 2)}
    assert {role: each.shape for role, each in trained.shown.items()} == {"small": (held, 2), "large": (held, 2)}
    assert all(each.shape == (held,) for each in trained.predicted.values())
    for each in times:
        assert each.probed.requests == each.routed.requests == 6
        assert 0.0 < each.probed.share.value < 1.0
        assert each.probed.decide_ms.value > 0.0
        assert 0.0 <= each.probed.to_large <= 1.0
        assert each.routed.more.value > -1.0
        assert each.routed.alike > 0.5
    assert [each.probed.concurrent for each in times] == list(bench_routing.CONCURRENT)
    assert [each.routed.concurrent for each in times] == list(bench_routing.CONCURRENT)


async def test_routing_is_timed_beside_the_same_requests_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a routed request waits for counts, be it outside of the decision; the order of the ways alternates."""
    asked: list[str | None] = []

    async def answered(pool: Any, call: GenerateCall, name: str) -> Record:
        asked.append(call.method)
        took = {"plain": 1.0, "auto": 1.5}[str(call.method)] * int(name)
        return Record(name, text=name if name == "2" else str(call.method), wall_s=took)

    class Routes:
        def __init__(self, config: RoutingConfig, *_: Any) -> None:
            assert config.policy.params == {"artifact": "router", "threshold": NEVER}

        async def close(self) -> None:
            pass

    monkeypatch.setattr(routed_walls, "answer", answered)
    monkeypatch.setattr(routed_walls, "PoolRouting", Routes)
    pool = cast("LocalPool", SimpleNamespace(name="demo", model_pool=None, routing=None, engines={}))
    calls = [GenerateCall(str(number), "demo", SamplingParams(), prompt="?") for number in (1, 2)]
    found = await routed_cost(pool, "router", calls, 1, 2)
    assert asked == ["plain", "plain", "auto", "auto", "auto", "auto", "plain", "plain"]
    assert (found.more.value, found.alike, found.requests, found.rounds) == (pytest.approx(0.5), 0.5, 2, 2)
    assert pool.routing is None
