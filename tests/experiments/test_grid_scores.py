"""Scores that were missing because of something that passes: a later run gives them, and answers nothing anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from experiments.grid import bench, loads
from experiments.grid.answering import answer_chunk
from experiments.grid.loads import run_load
from experiments.grid.planning import make_plan
from experiments.grid.runner import Ran, run_plan
from experiments.grid.scoring import Item, Score
from experiments.grid.spec import ExperimentSpec
from experiments.grid.store import Store
from experiments.reports.data import make_report
from pool.local_pool import LocalPool
from tests.experiments.grid_runs import PROMPTS, dataset, pair_config, spec
from turnout.calls import GenerateCall
from turnout.errors import Code, TurnoutError

AWAY = {"p1": Code.UNAVAILABLE, "p2": Code.DEADLINE_EXCEEDED, "p3": Code.UNAUTHENTICATED}
WRONG = {"p4": Code.INVALID_ARGUMENT}


class Judge:
    """Fails on some rows as long as it is away, and on others always."""

    generates = True

    def __init__(self) -> None:
        self.faults = {**AWAY, **WRONG}
        self.asked: list[str] = []

    async def score(self, item: Item, answer: str, pool: Any, model: str) -> Score:
        self.asked.append(item.id)
        if item.id in self.faults:
            raise TurnoutError(self.faults[item.id], f"{item.id} fails")
        return Score(0.5, "seen")

    def back(self) -> None:
        """What may pass has passed."""
        self.faults, self.asked = dict(WRONG), []


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Who scores, whatever the file chose."""
    made = Judge()
    monkeypatch.setattr(bench, "open_scorer", lambda choice: made)
    return made


def run(asked: ExperimentSpec, store: Store) -> Ran:
    """Run what is missing."""
    return run_plan(make_plan(asked, store), store)


def test_answers_whose_scorer_was_away_are_scored_by_the_next_run_and_not_answered_anew(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []

    async def counted(pool: Any, cell: Any, rows: Any) -> Any:
        answered.extend(number for number, _ in rows)
        return await answer_chunk(pool, cell, rows)

    monkeypatch.setattr(bench, "answer_chunk", counted)
    dataset(tmp_path)
    asked, store = spec(pair_config(tmp_path), tmp_path, methods=[{"name": "plain"}]), Store(tmp_path / "store")
    first = run(asked, store)
    [cell] = store.load("small").cells
    assert first.failed == {cell.name: "3 answers are not scored, and will be by a later run; of the first: p1 fails"}
    assert store.state(cell) == "unscored"
    before, facts = store.records(cell), store.facts(cell)
    assert facts is not None
    assert [record.score for record in before] == [0.5, None, None, None, None, 0.5]
    assert (make_report(store.load("small"), store).lines[0].unscored, answered) == (4, list(range(len(PROMPTS))))

    assert list(run(asked, store).failed) == [cell.name]  # still away
    judge.back()
    plan = make_plan(asked, store)
    assert (len(plan.todo), plan.prompts) == (1, 0)
    assert run_plan(plan, store) == Ran(1, {})
    after = store.records(cell)
    assert (sorted(judge.asked), answered) == (sorted(AWAY), list(range(len(PROMPTS))))
    assert [(record.score, record.again) for record in after] == [*[(0.5, False)] * 4, (None, False), (0.5, False)]
    assert [(r.id, r.text, r.wall_s) for r in after] == [(r.id, r.text, r.wall_s) for r in before]
    assert (store.state(cell), store.failure(cell)) == ("done", "")
    again = store.facts(cell)
    assert again is not None
    assert (again.wall_s, again.unscored) == (facts.wall_s, 0)
    assert make_plan(asked, store).todo == []


def test_answers_under_load_are_scored_again_and_the_schedule_is_not_repeated(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven: list[str] = []

    async def counted(pool: Any, cell: Any, items: Any, scorer: Any) -> Any:
        driven.append(cell.name)
        return await run_load(pool, cell, items, scorer)

    monkeypatch.setattr(bench, "run_load", counted)
    dataset(tmp_path, [{"id": "p1", "prompt": "one"}])
    asked = spec(
        *(pair_config(tmp_path), tmp_path), methods=[{"name": "plain"}], loads=[{"rate": 20.0, "duration_s": 0.5}]
    )
    store = Store(tmp_path / "store")
    assert len(run(asked, store).failed) == 1
    judge.back()
    assert run(asked, store) == Ran(1, {})
    [cell] = store.load("small").cells
    records = store.records(cell)
    assert len(judge.asked) == len(records) > 0
    assert {record.score for record in records} == {0.5}
    assert len(driven) == 1
    facts = store.facts(cell)
    assert facts is not None
    assert facts.load is not None


def test_what_never_comes_under_load_is_wrong_and_not_left_out(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, asked_for, driven = LocalPool.generate, list[str](), list[str]()

    async def alone(pool: Any, cell: Any, items: Any, scorer: Any) -> Any:
        driven.append(cell.name)
        try:
            return await run_load(pool, cell, items, scorer)
        finally:
            driven.clear()

    async def stuck(self: LocalPool, call: GenerateCall) -> AsyncGenerator[Any, None]:
        if driven:
            asked_for.append(call.request_id)
            if len(asked_for) % 2:
                await asyncio.Event().wait()
        async for event in generate(self, call):
            yield event

    judge.back()
    monkeypatch.setattr(bench, "run_load", alone)
    monkeypatch.setattr(LocalPool, "generate", stuck)
    monkeypatch.setattr(loads, "DRAIN_S", 8.0)
    dataset(tmp_path, [{"id": "p1", "prompt": "one"}])
    load = {"rate": 20.0, "duration_s": 0.5}
    asked = spec(pair_config(tmp_path), tmp_path, methods=[{"name": "plain"}], loads=[load])
    store = Store(tmp_path / "store")
    run(asked, store)
    [cell] = store.load("small").cells
    records = store.records(cell)
    assert len(records) == len(asked_for) > 2
    late = [record for record in records if record.error]
    assert len(late) == (len(asked_for) + 1) // 2
    assert all(record.error.startswith("DEADLINE_EXCEEDED: no whole answer") for record in late)
    assert {record.score for record in late} == {0.0}
