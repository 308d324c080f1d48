"""An experiment on a tiny pair: what is computed, what is not computed again, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from experiments.grid import answering, bench, depends
from experiments.grid.answering import answer_chunk
from experiments.grid.bench import CellBench
from experiments.grid.cells import Facts
from experiments.grid.planning import make_plan, ways
from experiments.grid.runner import run_plan
from experiments.grid.spec import ExperimentSpec
from experiments.grid.store import Store
from experiments.grid.utilisation import Sensors
from experiments.reports.data import make_report
from experiments.reports.html import to_html
from experiments.reports.text import to_json, to_markdown
from tests.experiments.grid_runs import PROMPTS, dataset, pair_config, spec
from turnout.errors import Code, TurnoutError


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a tiny random pair."""
    return pair_config(tmp_path_factory.mktemp("grid-pair"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty one."""
    dataset(tmp_path)
    return Store(tmp_path / "store")


def run(asked: ExperimentSpec, store: Store) -> tuple[int, int, dict[str, str]]:
    """Cells planned as missing, cells done, failures."""
    plan = make_plan(asked, store)
    ran = run_plan(plan, store)
    return len(plan.todo), ran.done, ran.failed


def test_a_second_run_computes_nothing_and_a_method_more_only_its_cells(
    pair: Path, store: Store, tmp_path: Path
) -> None:
    asked = spec(pair, tmp_path)
    assert run(asked, store) == (3, 3, {})
    assert run(asked, store) == (0, 0, {})
    assert run(
        spec(
            pair,
            tmp_path,
            baseline="plain",
            methods=[*_given(asked), {"name": "speculative", "label": "speculative", "params": {"length": "fixed"}}],
        ),
        store,
    ) == (
        1,
        1,
        {},
    )
    cells = store.load("small").cells
    assert [store.state(cell) for cell in cells] == ["done"] * 4
    answers = {cell.label: [record.text for record in store.records(cell)] for cell in cells}
    assert answers["speculative"] == answers["plain"]
    assert len(answers["plain"]) == len(PROMPTS)
    [drafted] = [store.records(cell) for cell in cells if cell.label == "speculative"]
    assert sum(sum(record.drafted_at) for record in drafted) > 0
    assert all("".join(text for _, _, text in record.pieces) for record in drafted)


def _given(asked: ExperimentSpec) -> list[dict[str, Any]]:
    return [entry.model_dump(exclude_defaults=True) for entry in asked.methods if not isinstance(entry, str)]


def test_what_decides_an_outcome_decides_the_address(
    pair: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def addresses(**changes: Any) -> set[str]:
        return {cell.address for cell in make_plan(spec(pair, tmp_path, **changes), store).cells}

    first = addresses()
    assert addresses(name="other") == first
    for changes in ({"seeds": [1]}, {"sampling": {"temperature": 0.5, "max_tokens": 8}}, {"loads": [{"at_once": 1}]}):
        assert not addresses(**changes) & first
    dataset(tmp_path, [{"prompt": "another"}])
    assert not addresses() & first
    dataset(tmp_path)
    assert addresses() == first
    known = depends._versions()
    assert set(known) == {"python", "torch", "transformers", "numpy"}
    monkeypatch.setattr(depends, "_versions", lambda: {**known, "torch": "9.9"})
    assert not addresses() & first


def test_a_run_that_was_cut_off_goes_on_prompt_by_prompt(
    pair: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Store(tmp_path / "whole")
    asked = spec(pair, tmp_path, methods=[{"name": "plain"}])
    run(asked, whole)
    chunks: list[int] = []

    async def cut(pool: Any, cell: Any, rows: Any) -> Any:
        if len(chunks) == 2:
            raise KeyboardInterrupt
        chunks.append(rows[0][0])
        return await answer_chunk(pool, cell, rows)

    monkeypatch.setattr(bench, "answer_chunk", cut)
    with pytest.raises(KeyboardInterrupt):
        run(asked, store)
    [cell] = store.load("small").cells
    assert store.state(cell) == "partial"
    assert make_plan(asked, store).prompts == 2
    monkeypatch.setattr(bench, "answer_chunk", answer_chunk)
    assert run(asked, store) == (1, 1, {})
    assert chunks == [0, 2]
    assert [r.text for r in store.records(cell)] == [r.text for r in whole.records(cell)]


def test_a_cell_that_fails_is_named_and_the_rest_goes_on(
    pair: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def broken(pool: Any, cell: Any, rows: Any) -> Any:
        if cell.method == "entropy_adaptive" and cell.params["threshold"] == 1.0:
            raise RuntimeError("a fault of ours")
        return await answer_chunk(pool, cell, rows)

    monkeypatch.setattr(bench, "answer_chunk", broken)
    todo, done, failed = run(spec(pair, tmp_path), store)
    assert (todo, done) == (3, 2)
    assert failed == {
        "near / entropy_adaptive threshold=1.0 / rows / 8 at once / seed 0": "RuntimeError: a fault of ours"
    }
    assert "a fault of ours" in to_markdown(make_report(store.load("small"), store))
    monkeypatch.setattr(bench, "answer_chunk", answer_chunk)
    assert run(spec(pair, tmp_path), store) == (1, 1, {})


def test_what_is_refused_is_not_tried_again_unless_asked(pair: Path, store: Store, tmp_path: Path) -> None:
    asked = spec(
        pair,
        tmp_path,
        methods=[{"name": "plain"}, {"name": "speculative", "params": {"drafter": "medusa"}, "label": "m"}],
    )
    _, done, failed = run(asked, store)
    assert done == 1
    assert "medusa" in failed["near / m / rows / 8 at once / seed 0"]
    assert run(asked, store) == (0, 0, {})
    assert len(make_plan(asked, store, again=True).todo) == 1


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("long", [[0], [0, 1, 2], [5]])
def test_prompts_that_are_refused_cost_themselves_only(
    pair: Path, store: Store, tmp_path: Path, chunk: int, long: list[int]
) -> None:
    dataset(tmp_path, [{"prompt": "a word " * 20_000 if n in long else text} for n, text in enumerate(PROMPTS)])
    assert run(spec(pair, tmp_path, methods=[{"name": "plain"}], chunk=chunk), store) == (1, 1, {})
    records = store.records(store.load("small").cells[0])
    assert [bool(record.error) for record in records] == [n in long for n in range(len(PROMPTS))]


def test_the_same_cell_under_two_labels_is_run_once(pair: Path, store: Store, tmp_path: Path) -> None:
    twice = spec(pair, tmp_path, methods=[{"name": "plain"}, {"name": "plain", "label": "again"}])
    assert run(twice, store) == (1, 1, {})
    assert len(make_report(store.load("small"), store).lines) == 2


async def test_scoring_waits_its_turn_and_is_no_part_of_the_time(
    pair: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each score is held back until as many as may are at work, or as are left, and the clock stands still."""
    cores, at_once, most, left = len(os.sched_getaffinity(0)), 0, 0, len(PROMPTS)
    several = asyncio.Event()
    measured: list[Facts] = []

    async def slow(pool: Any, cell: Any, item: Any, record: Any, scorer: Any) -> Any:
        nonlocal at_once, most, left
        at_once += 1
        most = max(most, at_once)
        if at_once == min(cores, left):
            several.set()
        await several.wait()
        at_once, left = at_once - 1, left - 1
        record.score = 1.0

    @contextmanager
    def clock(facts: Facts, sensors: Sensors) -> Iterator[None]:
        yield
        assert most == 0, "a score was begun while the answers were measured"
        measured.append(facts)

    monkeypatch.setattr(answering, "scored", slow)
    monkeypatch.setattr(bench, "_measured", clock)
    plan = make_plan(spec(pair, tmp_path, methods=[{"name": "plain"}], chunk=len(PROMPTS)), store)
    bench_ = CellBench(plan.config, store.root)
    await bench_.run(plan.todo[0])
    await bench_.close()
    assert most == min(cores, len(PROMPTS))
    assert len(measured) == 1
    assert [record.score for record in store.records(plan.cells[0])] == [1.0] * len(PROMPTS)


def test_a_scorer_that_fails_costs_its_prompt(pair: Path, store: Store, tmp_path: Path) -> None:
    rows = [{"id": n, "prompt": "one", "answer": "(" if n == 1 else "."} for n in range(3)]
    dataset(tmp_path, rows)
    data = {"path": str(tmp_path / "rows.jsonl"), "chat": False, "scorer": {"kind": "regex"}}
    assert run(spec(pair, tmp_path, methods=[{"name": "plain"}], datasets=[data]), store) == (1, 1, {})
    records = store.records(store.load("small").cells[0])
    assert [record.score for record in records] == [1.0, None, 1.0]
    assert "no regular expression" in records[1].note
    line = make_report(store.load("small"), store).lines[0]
    assert (line.prompts, line.unscored) == (2, 1)


def test_a_likelihood_needs_no_answer_and_only_a_model(pair: Path, store: Store, tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "chat": False, "scorer": {"kind": "likelihood"}}
    asked = spec(pair, tmp_path, datasets=[data])
    assert run(asked, store) == (1, 1, {})
    saved = store.load("small")
    assert len(saved.refused) == 2
    records = store.records(saved.cells[0])
    assert all(record.score is not None and record.score < 0 and not record.text for record in records)


def test_a_judge_grades_and_one_without_a_number_costs_its_prompt(pair: Path, store: Store, tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "chat": False, "scorer": {"kind": "judge", "max_tokens": 4}}
    assert run(spec(pair, tmp_path, methods=[{"name": "plain"}], datasets=[data]), store) == (1, 1, {})
    records = store.records(store.load("small").cells[0])
    assert all("judge" in record.note for record in records if record.score is None)
    assert all(0.0 <= record.score <= 1.0 for record in records if record.score is not None)


def test_open_loop_load_is_measured_from_the_schedule(pair: Path, store: Store, tmp_path: Path) -> None:
    load = {"rate": 20.0, "duration_s": 0.5, "ttft_s": 60.0, "tpot_s": 10.0}  # kept on a busy machine too
    asked = spec(pair, tmp_path, methods=[{"name": "plain"}], loads=[load])
    assert run(asked, store) == (1, 1, {})
    report = make_report(store.load("small"), store)
    [load] = report.loads
    assert load["requests"] == load["answered"] > 0
    assert load["goodput"] > 0
    assert "time to first token" in to_html(report)


def test_a_stop_rule_ends_a_cell_early_and_is_part_of_its_address(pair: Path, store: Store, tmp_path: Path) -> None:
    dataset(tmp_path, [{"id": n, "prompt": f"prompt number {n}"} for n in range(120)])
    methods = [{"name": "plain"}, {"name": "speculative"}]
    changes: dict[str, Any] = {"methods": methods, "chunk": 40, "sampling": {"temperature": 0, "max_tokens": 1}}
    free = {cell.address for cell in make_plan(spec(pair, tmp_path, **changes), store).cells}
    asked = spec(pair, tmp_path, stop={"margin": 0.5}, **changes)
    ruled = make_plan(asked, store).cells
    assert len(free & {cell.address for cell in ruled}) == 1  # the baseline's
    assert run(asked, store) == (2, 2, {})
    facts = {cell.label: store.facts(cell) for cell in ruled}
    assert facts["plain"] is not None
    assert facts["plain"].stopped == ""
    assert facts["speculative"] is not None
    assert facts["speculative"].stopped.startswith("no worse after 40 prompts")
    assert -0.5 < (facts["speculative"].sequence or [-1.0])[0] <= 0.0
    assert make_report(store.load("small"), store).lines[1].prompts == 40


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": [{"name": "nothing"}]}, "methods.0.name: 'nothing' is not known"),
        ({"methods": [{"name": "plain", "params": {"model": 3}}]}, "methods.0.params.model"),
        (
            {"methods": [{"name": "plain"}, {"name": "plain", "params": {"model": "small"}, "label": "plain"}]},
            "is there already",
        ),
        ({"baseline": "best"}, "baseline: 'best' is not known; available: entropy_adaptive threshold=1.0"),
        ({"pools": ["far"]}, "pools: 'far' is not known; available: near"),
    ],
)
def test_a_file_at_fault_is_refused_before_anything_runs(
    pair: Path, store: Store, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TurnoutError) as refusal:
        make_plan(spec(pair, tmp_path, **changes), store)
    assert said in refusal.value.message


def test_a_dataset_at_fault_names_row_and_field(pair: Path, store: Store, tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "rows.jsonl"), "chat": False, "scorer": {"kind": "numeric", "answer": "result"}}
    asked = spec(pair, tmp_path, datasets=[data])
    with pytest.raises(TurnoutError, match=r"row 1 .p0.: lacks 'result', which the scorer numeric needs"):
        make_plan(asked, store)
    dataset(tmp_path, [{"id": "a", "prompt": "x", "result": 1}, {"id": "a", "prompt": "y", "result": 1}])
    with pytest.raises(TurnoutError, match="row 2: id 'a' was given before"):
        make_plan(asked, store)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "result": 1}\n{"prompt": ', encoding="utf-8")
    with pytest.raises(TurnoutError, match="line 2: is no JSON"):
        make_plan(asked, store)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(TurnoutError, match="cannot read"):
        make_plan(asked, store)


def test_a_store_that_cannot_be_written_to_ends_the_run_and_names_itself(
    pair: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec(pair, tmp_path, methods=[{"name": "plain"}])
    plan = make_plan(asked, store)

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(TurnoutError, match=r"store: cannot write .* No space left") as refusal:
            run_plan(plan, store)
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
    assert run(asked, store) == (1, 1, {})


def test_removing_an_experiment_leaves_the_cells_of_others(pair: Path, store: Store, tmp_path: Path) -> None:
    run(spec(pair, tmp_path, methods=[{"name": "plain"}, {"name": "speculative"}]), store)
    run(spec(pair, tmp_path, name="part", methods=[{"name": "plain"}]), store)
    assert store.names() == ["part", "small"]
    assert store.remove("small") == 1
    assert store.names() == ["part"]
    assert store.state(store.load("part").cells[0]) == "done"
    with pytest.raises(TurnoutError, match="'small' is not known; available: part"):
        store.load("small")
    with pytest.raises(TurnoutError, match="must be letters"):
        store.load("../part")


def test_registered_ways_are_all_methods_once(pair: Path, tmp_path: Path) -> None:
    dataset(tmp_path)
    labels = [way.label for way in ways(spec(pair, tmp_path, methods=["registered", "speculation"]))]
    assert {"plain", "plain model=small", "best_of", "speculative", "speculative copyspec"} <= set(labels)
    assert len(labels) == len(set(labels))


def test_a_way_that_is_left_out_is_named_with_its_reason(pair: Path, store: Store, tmp_path: Path) -> None:
    asked = spec(pair, tmp_path, methods=["registered"], left_out={"best_of": "too dear here"})
    assert "best_of" not in [way.label for way in ways(asked)]
    plan = make_plan(asked, store)
    assert plan.refused == {"best_of": "too dear here"}
    with pytest.raises(TurnoutError, match=r"left_out: 'best' is not known; available: .*best_of"):
        ways(spec(pair, tmp_path, methods=["registered"], left_out={"best": "a slip"}))


def test_parquet_is_read_as_json_lines_are(pair: Path, store: Store, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    one = make_plan(spec(pair, tmp_path), store).cells
    data = {"path": str(tmp_path / "rows.parquet"), "chat": False, "scorer": {"kind": "regex", "pattern": "[aeiou]"}}
    assert [c.address for c in make_plan(spec(pair, tmp_path, datasets=[data]), store).cells] == [
        c.address for c in one
    ]
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(TurnoutError, match="cannot read"):
        make_plan(spec(pair, tmp_path, datasets=[data]), store)


async def test_a_dataset_that_changed_under_a_plan_is_refused(pair: Path, store: Store, tmp_path: Path) -> None:
    plan = make_plan(spec(pair, tmp_path), store)
    dataset(tmp_path, [{"prompt": "another"}])
    with pytest.raises(TurnoutError, match="is not what it was"):
        await CellBench(plan.config, store.root).run(plan.todo[0])


def test_a_report_is_one_file_without_a_network_and_json_has_points(pair: Path, store: Store, tmp_path: Path) -> None:
    methods = ["registered", {"name": "random_switch", "grid": {"share": [0.3, 0.7]}}]
    run(spec(pair, tmp_path, methods=methods, left_out={"cold": "thousands of gradient steps"}), store)
    gone = store.load("small").cells[-1].address
    shutil.rmtree(tmp_path / "store" / "cells" / gone[:2] / gone)
    report = make_report(store.load("small"), store)
    page = to_html(report)
    assert "default-src 'none'" in page
    assert not [word for word in ("src=", "http://", "https://", "@import", "url(") if word in page]
    assert page.count("<svg") >= 2
    assert "accepted" in page
    assert "not run (absent)" in page
    points = json.loads(to_json(report))["points"]
    assert {"label", "method", "dataset", "quality", "quality_low", "quality_high", "cost"} <= set(points[0])
    assert next(point["cost"] for point in points if point["label"] == "plain") == 1.0
