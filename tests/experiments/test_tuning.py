"""The search over parameters on a tiny pair: its target is kept, it goes on after a cut, and ends as an artifact."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from optuna.storages.journal import JournalFileBackend

from decoding.artifacts import Artifact
from decoding.calibration import KnobCalibration
from experiments.tuning import Range, Tuner
from pool.local_pool import LocalPool
from tests.experiments.grid_runs import pair_config
from training.calibration_data import Question, QuestionSet
from training.knob_calibration import TRAINER, Calibrator, Target
from training.question_runs import Bench, Run
from turnout.config import load_config
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

ASKED = QuestionSet(tuple(Question(f"question {n}", None) for n in range(12)), "agreement", "made", "0" * 32)


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A tiny random pair that often agrees."""
    pool = LocalPool.load("near", load_config(pair_config(tmp_path)))
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    yield Bench.of(pool, sampling, seed=1, chat=False)
    await pool.close()


async def test_the_cheapest_setting_that_keeps_the_quality_is_found(bench: Bench) -> None:
    tuner = Tuner(
        bench, ASKED, "entropy_adaptive", {}, {"threshold": Range(0.0, 8.0), "window": Range(1, 3, whole=True)}
    )
    best = await tuner.search(Target(quality=0.8), trials=8)
    assert best.retained >= 0.8
    assert 0.0 < best.costs["paper"] <= 1.0
    assert set(best.params) == {"threshold", "window"}


async def test_the_paper_cost_is_of_the_runs_own_tokens_as_a_calibration_has_it(bench: Bench) -> None:
    """Answers twice as long as the large model's, all of them its own: every token costs 1, and FLOPs twice as many."""
    ones = np.ones(3)
    parameters = bench.models.large.num_parameters
    large = Run(8 * ones, 8 * ones, 8 * parameters * ones, 100 * ones, ones, 0 * ones, [None] * 3, ones)
    longer = replace(large, tokens=16 * ones, by_large=16 * ones, paid=16 * parameters * ones, flops=200 * ones)
    tuner = Tuner(bench, ASKED, "entropy_adaptive", {}, {"threshold": Range(0.5, 8.0)}, _large=large)
    costs = tuner._measured({}, longer).costs
    assert (costs["paper"], costs["flops"]) == (1.0, 2.0)
    calibrator = Calibrator(bench, ASKED, "entropy_adaptive", {}, 3, large=large)
    assert calibrator._point(0.5, 1.0, longer, []).paper.value == costs["paper"]


async def test_a_journal_that_cannot_be_written_is_named(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(journal: Path) -> Any:
        space = {"threshold": Range(0.5, 8.0)}
        return Tuner(bench, ASKED, "entropy_adaptive", {}, space, journal).search(Target(budget=1.5), 2)

    (tmp_path / "file").write_text("")
    with pytest.raises(TurnoutError, match=r"^journal: cannot write .*trials\.journal: "):
        await search(tmp_path / "file" / "trials.journal")
    journal, append = tmp_path / "trials.journal", JournalFileBackend.append_logs

    def full(self: Any, logs: list[dict[str, Any]]) -> None:
        if any("tried" in str(each) for each in logs):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, logs)

    monkeypatch.setattr(JournalFileBackend, "append_logs", full)
    with pytest.raises(TurnoutError, match=r"^journal: cannot write .*trials\.journal: No space left"):
        await search(journal)


async def test_a_search_that_was_cut_off_goes_on(bench: Bench, tmp_path: Path) -> None:
    told: list[int] = []
    space = {"threshold": Range(0.5, 8.0, logarithmic=True)}
    journal = tmp_path / "kept" / "trials.journal"
    for trials in (3, 5):
        tuner = Tuner(bench, ASKED, "entropy_adaptive", {}, space, journal, lambda what, done, total: told.append(done))
        await tuner.search(Target(budget=1.5), trials)
    assert told == [0, 1, 2, 3, 3, 4, 5]


async def test_another_cost_is_another_search(bench: Bench, tmp_path: Path) -> None:
    """What is cheapest by one meter says nothing by another, whatever is aimed at."""
    journal, told = tmp_path / "trials.journal", list[int]()
    for meter in ("paper", "wall", "paper"):
        space = {"threshold": Range(0.5, 8.0)}
        tuner = Tuner(bench, ASKED, "entropy_adaptive", {}, space, journal, lambda what, done, total: told.append(done))
        await tuner.search(Target(quality=0.1, meter=meter), 2)
    assert told == [0, 1, 2, 0, 1, 2, 2]


async def test_an_outage_is_no_bad_setting(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, run = tmp_path / "trials.journal", Bench.run

    async def away(self: Bench, questions: Any, method: str, params: Any) -> Any:
        if method == "entropy_adaptive":
            raise TurnoutError(Code.UNAVAILABLE, "the models are lost")
        return await run(self, questions, method, params)

    def tuner() -> Tuner:
        return Tuner(bench, ASKED, "entropy_adaptive", {}, {"threshold": Range(0.5, 8.0)}, journal)

    monkeypatch.setattr(Bench, "run", away)
    with pytest.raises(TurnoutError, match="the models are lost"):
        await tuner().search(Target(budget=1.5), 2)
    monkeypatch.setattr(Bench, "run", run)
    assert (await tuner().search(Target(budget=1.5), 2)).retained > 0.0


async def test_another_range_is_another_search_and_one_that_goes_on_draws_anew(bench: Bench, tmp_path: Path) -> None:
    journal = tmp_path / "trials.journal"
    told: list[tuple[str, int]] = []

    def tuner(high: float) -> Tuner:
        space = {"threshold": Range(0.5, high)}
        return Tuner(
            bench, ASKED, "entropy_adaptive", {}, space, journal, lambda what, done, total: told.append((what, done))
        )

    await tuner(8.0).search(Target(budget=1.5), 2)
    await tuner(8.0).search(Target(budget=1.5), 4)
    tried = [what for what, _ in told if what != "trials"]
    assert len(set(tried)) == len(tried) == 4
    told.clear()
    await tuner(0.6).search(Target(budget=1.5), 1)
    assert [done for _, done in told] == [0, 1]


async def test_the_knob_ends_as_the_artifact_that_serving_reads(bench: Bench, tmp_path: Path) -> None:
    space = {"threshold": Range(0.5, 8.0), "min_stay": Range(choices=(1, 2))}
    tuner = Tuner(bench, ASKED, "entropy_adaptive", {"window": 1}, space)
    target = Target(budget=0.9)
    best = await tuner.search(target, trials=3)
    outcome = await tuner.calibrate(best, target, points=3)
    assert outcome is not None
    outcome.calibration.to_artifact({}, TRAINER).save(tmp_path / "tuned.safetensors")
    read = KnobCalibration.of(Artifact.load(tmp_path / "tuned.safetensors"), "calibration")
    assert read.method == "entropy_adaptive"
    assert (read.fixed["window"], read.fixed["min_stay"]) == (1, best.params["min_stay"])


async def test_a_target_that_nothing_meets_says_how_near_it_came(bench: Bench) -> None:
    tuner = Tuner(bench, ASKED, "entropy_adaptive", {}, {"threshold": Range(0.5, 8.0)})
    with pytest.raises(TurnoutError, match="met by none of 2 settings; the nearest lacks"):
        await tuner.search(Target(budget=0.01), trials=2)


async def test_a_setting_the_method_refuses_costs_a_trial(bench: Bench) -> None:
    tuner = Tuner(bench, ASKED, "plain", {}, {"model": Range(choices=("Huge", "Tiny"))})
    with pytest.raises(TurnoutError, match=r"no setting could be run: search\.model"):
        await tuner.search(Target(budget=1.0), trials=3)


async def test_searches_that_make_no_sense_are_refused(bench: Bench) -> None:
    with pytest.raises(TurnoutError, match=r"search\.nothing: unknown; plain has: model"):
        Tuner(bench, ASKED, "plain", {}, {"nothing": Range(choices=(1,))})
    with pytest.raises(TurnoutError, match="at least one parameter"):
        Tuner(bench, ASKED, "plain", {}, {})


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("1:8", Range(1, 8, whole=True)),
        ("0.1:0.5", Range(0.1, 0.5)),
        ("0.1:1:log", Range(0.1, 1.0, logarithmic=True)),
        ("next,3", Range(choices=("next", 3))),
    ],
)
def test_ranges_are_read(text: str, made: Range) -> None:
    assert Range.parse("x", text) == made


@pytest.mark.parametrize("text", ["8:1", "a:b", "0:1:log", "1:2:3"])
def test_ranges_at_fault_are_refused(text: str) -> None:
    with pytest.raises(TurnoutError, match=r"search\.x: must be LOW:HIGH"):
        Range.parse("x", text)
