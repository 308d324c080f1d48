"""Scorers that do not come to an end: each costs its prompt, and nothing else waits for it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from experiments.grid import answering
from experiments.grid.answering import scored
from experiments.grid.cells import Record
from experiments.grid.datasets import open_dataset
from experiments.grid.scorers.judge import JudgeScorer
from experiments.grid.scoring import Item, JudgeChoice, Score
from experiments.grid.spec import DatasetChoice, read_spec
from tests.deployments.access.kit import house, served
from tests.experiments.grid_runs import made_cell

POOL: Any = SimpleNamespace(name="near", roles={"small": "small", "large": "large"})
ITEM = Item("a", "one and one?")


class Hanging:
    generates = True

    async def score(self, item: Item, answer: str, pool: Any, model: str) -> Score:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_scorer_that_hangs_costs_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "SCORE_S", 0.05)
    async with asyncio.timeout(20):
        record = await scored(POOL, made_cell("plain"), ITEM, Record("a", text="two"), Hanging())
    assert (record.score, record.note) == (None, "the scorer came to no end within 0.05 s")


async def test_a_judge_behind_keys_is_asked_with_the_one_in_a_file(tmp_path: Path) -> None:
    notes = {}
    with house(tmp_path, {"acme": {}}) as tenants, served(tenants.service) as server:
        (tmp_path / "acme.key").write_text(tenants.keys["acme"] + "\n")
        for key_file in (None, str(tmp_path / "acme.key"), str(tmp_path / "none.key")):
            judge = JudgeScorer(JudgeChoice(kind="judge", address=server.address, model="demo", key_file=key_file))
            record = await scored(POOL, made_cell("plain"), ITEM, Record("a", text="two"), judge)
            assert record.score is None
            notes[key_file] = record.note
    without, with_key, missing = notes.values()
    assert "authorization: is needed" in without
    assert "gave no number" in with_key
    assert "scorer.key_file: cannot read" in missing


def test_a_key_changes_nothing_of_what_is_scored_and_goes_with_an_address(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one and one?"}\n')
    digests = set()
    for more in ({}, {"key_file": "a"}, {"key_file": "b"}, {"address": "elsewhere:1"}):
        scorer = {"kind": "judge", "address": "there:1", **more}
        choice = DatasetChoice.model_validate({"path": str(tmp_path / "rows.jsonl"), "name": "r", "scorer": scorer})
        digests.add((scorer["address"], open_dataset(choice).digest))
    assert len(digests) == 2
    scorer = {"kind": "judge", "address": "there:1", "key_file": "judge.key"}
    rows = {"path": "rows.jsonl", "name": "r", "scorer": scorer}
    spec = {"name": "s", "methods": [{"name": "plain"}], "datasets": [rows]}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    [placed] = read_spec(tmp_path / "spec.yaml").datasets
    assert isinstance(placed.scorer, JudgeChoice)
    assert placed.scorer.key_file == str(tmp_path / "judge.key")
    with pytest.raises(ValidationError, match="goes with an address"):
        JudgeChoice(kind="judge", key_file="a")


async def test_a_judge_that_takes_connections_and_never_answers_costs_its_prompt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        judge = JudgeScorer(JudgeChoice(kind="judge", address=address, timeout_s=0.3))
        async with asyncio.timeout(20):
            record = await scored(POOL, made_cell("plain"), ITEM, Record("a", text="two"), judge)
    assert (record.score, record.note) == (None, "the judge did not reply within 0.3 s")
