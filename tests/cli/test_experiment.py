"""`turnout experiment`: an experiment from its file to its report, on a tiny pair."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.grid.store import Store
from experiments.tuning import Tuner
from tests.experiments.grid_runs import dataset, pair_config, save_made, spec
from tests.experiments.route_logs import split
from training.calibration_data import FEWEST
from turnout.errors import invalid


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """A file with three cells."""
    dataset(tmp_path)
    spec(pair_config(tmp_path), tmp_path)
    return tmp_path / "experiment.yaml"


def test_run_again_show_list_and_remove(run: Any, experiment: Path, tmp_path: Path) -> None:
    kept = ("--store", str(tmp_path / "kept"))
    first = run("experiment", "run", str(experiment), *kept, "--out", str(tmp_path / "out"))
    assert first.code == 0
    assert "3 cells: 0 were there, 3 computed, 0 failed" in first.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["small.html", "small.json", "small.md"]
    again = run("experiment", "resume", "small", *kept, "--json")
    assert "3 cells: 3 were there, 0 computed" in again.err
    assert json.loads(again.out)["title"] == "small"
    assert json.loads(run("experiment", "list", *kept, "--json").out) == [{"name": "small", "cells": 3, "done": 3}]
    shown = run("experiment", "show", "small", *kept).out
    assert "threshold=3.0" in shown
    assert "on the clock in 1 runs" in shown
    assert run("experiment", "rm", "small", *kept).out == "3 cells deleted\n"
    assert run("experiment", "show", "small", *kept).code == 1


def test_answers_are_looked_at_prompt_by_prompt(run: Any, tmp_path: Path) -> None:
    store, right = Store(tmp_path), np.ones(30)
    wrong = right.copy()
    wrong[4] = 0.0
    save_made(store, "made", {"plain": right, "other": wrong}, run=0)
    kept = ("--store", str(tmp_path))
    listed = run("experiment", "answers", "made", *kept)
    assert listed.code == 0
    assert listed.out.splitlines()[3].split()[:2] == ["p4", "made"]
    assert "10 more" in listed.out
    whole = run("experiment", "answers", "made", *kept, "--prompt", "p4").out
    assert "plain: score 1.00, 8 tokens, 8 written by the large model" in whole
    assert "other: score 0.00" in whole
    lines = [json.loads(line) for line in run("experiment", "answers", "made", *kept, "--json").out.splitlines()]
    assert len(lines) == 30
    assert {label: way["score"] for label, way in lines[0]["ways"].items()} == {"plain": 1.0, "other": 0.0}
    assert "asked no prompt with the id 'p99'" in run("experiment", "answers", "made", *kept, "--prompt", "p99").err
    assert "no answers to none" in run("experiment", "answers", "made", *kept, "--dataset", "none").err


def test_a_large_grid_is_asked_about_with_an_estimate(run: Any, experiment: Path, tmp_path: Path) -> None:
    text = experiment.read_text(encoding="utf-8")
    experiment.write_text(text + "max_cells: 2\n", encoding="utf-8")
    kept = ("--store", str(tmp_path / "kept"))
    asked = run("experiment", "run", str(experiment), *kept)
    assert asked.code == 1
    assert "3 cells, 18 prompts, at most 144 tokens, about 0 s (a rough guess" in asked.err
    assert "run it with --yes" in asked.err
    loads = [{"at_once": n} for n in range(1, 341)]
    huge = text.replace(
        "workers: 0", f"workers: 0\nprice_per_hour: 2.0\nseeds: {list(range(1000))}\nloads: {json.dumps(loads)}"
    )
    experiment.write_text(huge, encoding="utf-8")
    asked = run("experiment", "run", str(experiment), *kept)
    assert asked.code == 1
    said = " ".join(asked.err.split())
    asked_about = "the whole grid: 1020000 cells, 6120000 prompts, at most 48960000 tokens"
    assert re.search(asked_about + r", about [\d.]+ (s|min|h) \(.*\), price \d", said)
    assert not (tmp_path / "kept").exists()


def test_a_report_that_cannot_be_written_is_named(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_made(Store(tmp_path / "kept"), "made", {"plain": np.ones(30), "other": np.ones(30)}, run=0)
    shown = ("experiment", "show", "made", "--store", str(tmp_path / "kept"), "--out", str(tmp_path / "out"))
    assert run(*shown).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        refused = run(*shown)
    assert refused.code == 1
    assert "No space left on device" in refused.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_that_cannot_be_is_refused_before_anything_is_run(run: Any, experiment: Path, tmp_path: Path) -> None:
    kept = ("--store", str(tmp_path / "kept"))
    refused = run("experiment", "run", str(experiment), *kept, "--out", str(experiment / "below"))
    assert refused.code == 1
    assert "is no folder that can be written in" in " ".join(refused.err.split())
    assert not (tmp_path / "kept").exists()


def test_compare_sets_the_exit_code(run: Any, tmp_path: Path) -> None:
    store, good = Store(tmp_path), np.ones(200)
    bad = good.copy()
    bad[:30] = 0.0
    save_made(store, "then", {"plain": good, "other": good}, run=0)
    save_made(store, "now", {"plain": good, "other": bad}, run=1)
    worse = run("experiment", "compare", "then", "now", "--store", str(tmp_path))
    assert worse.code == 1
    assert worse.out.count("WORSE") == 1
    assert "1 regressions among 6 figures" in worse.out
    assert run("experiment", "compare", "now", "then", "--store", str(tmp_path)).code == 0


def test_live_reads_route_logs(run: Any, tmp_path: Path) -> None:
    log = tmp_path / "route.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in split(-0.3, 200)), encoding="utf-8")
    shown = run("experiment", "live", str(log), "--control", "old")
    assert shown.code == 0
    assert "stop: better" in shown.out
    assert "units tell" in shown.out
    assert "metric: must be one of answered" in run("experiment", "live", str(log), "--metric", "looks").err
    out = tmp_path / "out"
    found = run("experiment", "live", str(log), "--control", "old", "--pool", "demo", "--out", str(out), "--json")
    assert [line["verdict"] for line in json.loads(found.out)["arms"]] == ["control", "stop: better"]
    assert sorted(path.name for path in out.iterdir()) == [f"live-demo.{ending}" for ending in ("html", "json", "md")]
    assert json.loads((out / "live-demo.json").read_text(encoding="utf-8")) == json.loads(found.out)
    decided = tmp_path / "decided.json"
    run("experiment", "live", str(log), "--control", "old", "--margin", "0.5", "--decide", str(decided))
    assert not decided.exists()
    run("experiment", "live", str(log), "--control", "old", "--decide", str(decided))
    assert json.loads(decided.read_text(encoding="utf-8"))["arm"] == "new"


def test_live_scores_answers(run: Any, tmp_path: Path) -> None:
    texts = {"request": {"prompt": "x"}, "answers": ["12"]}
    log, scorer = tmp_path / "route.jsonl", tmp_path / "scorer.yaml"
    log.write_text("".join(json.dumps({**each, **texts}) + "\n" for each in split(0.0, 20)), encoding="utf-8")
    scorer.write_text("scorer: {kind: regex, pattern: '[0-9]'}", encoding="utf-8")
    given = ("experiment", "live", str(log), "--control", "old")
    found = json.loads(run(*given, "--scorer", str(scorer), "--metric", "score", "--json").out)
    assert found["scores"] == ["scored by regex: 40 of 40 answers"]
    assert found["arms"][1]["means"]["score"]["value"] == 1.0
    shown = run(*given, "--scorer", str(scorer))
    assert "scored by regex: 40 of 40 answers" in shown.out
    assert "score" not in run(*given).out
    assert "metric: score needs --scorer FILE.yaml" in run(*given, "--metric", "score").err


def test_what_was_found_is_told_also_where_its_curve_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: Tuner, best: Any, target: Any, points: int = 7) -> None:
        raise invalid("budget", "is below what any position costs")

    monkeypatch.setattr(Tuner, "calibrate", refused)
    rows = [{"prompt": f"what is {n}?"} for n in range(FEWEST)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = pair_config(tmp_path)
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    values["pools"]["near"]["artifacts"] = str(tmp_path)
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    asked = (
        *("experiment", "tune", "entropy_adaptive", "--config", str(config)),
        *("--data", str(tmp_path / "data.jsonl"), "--budget", "9", "--search", "threshold=1:2", "--trials", "1"),
        *("--max-tokens", "4", "--out", "curve"),
    )
    told = run(*asked)
    assert (told.code, told.out.partition(": ")[0]) == (1, "best")
    assert "is below what any position costs" in told.err
    as_json = run(*asked, "--json")
    assert as_json.code == 1
    found = json.loads(as_json.out)
    assert (list(found["best"]["params"]), found["artifact"]) == (["threshold"], None)


def test_an_experiment_of_another_version_hides_no_other(run: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("made", "other"):
        save_made(store, name, {"plain": np.ones(2)}, run=0)
    path = tmp_path / "experiments" / "other" / "experiment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "spec": {}}), encoding="utf-8")
    kept = ("--store", str(tmp_path))
    listed = run("experiment", "list", *kept, "--json")
    assert (listed.code, [each["name"] for each in json.loads(listed.out)]) == (0, ["made"])
    assert "'other' cannot be read" in listed.err
    assert "'other' cannot be read" in run("experiment", "show", "other", *kept).err
    assert run("experiment", "rm", "other", *kept).out == "0 cells deleted\n"


def test_tune_refuses_what_it_cannot_search(run: Any, config_file: Path) -> None:
    given = ("experiment", "tune", "entropy_adaptive", "--config", str(config_file), "--budget", "0.5")
    assert "search.window: must be LOW:HIGH" in run(*given, "--search", "window=5:1", "--demo", "lists").err
    assert "give either --data FILE or --demo KIND" in run(*given, "--search", "window=1:5").err
    assert run(*given, "--search", "window", "--demo", "lists").code == 2
    (config_file.parent / "file").write_text("", encoding="utf-8")
    journal = str(config_file.parent / "file" / "trials")
    told = run(*given, "--search", "window=1:5", "--demo", "lists", "--journal", journal)
    assert told.code == 1
    assert "journal: cannot write" in told.err
