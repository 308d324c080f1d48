"""Scorers that do not come to an end: each costs its prompt, and nothing else waits for it."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.grid import answering
from experiments.grid.answering import scored
from experiments.grid.cells import Record
from experiments.grid.scorers.judge import JudgeScorer
from experiments.grid.scoring import Item, JudgeChoice, Score
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


async def test_a_judge_that_takes_connections_and_never_answers_costs_its_prompt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        judge = JudgeScorer(JudgeChoice(kind="judge", address=address, timeout_s=0.3))
        async with asyncio.timeout(20):
            record = await scored(POOL, made_cell("plain"), ITEM, Record("a", text="two"), judge)
    assert (record.score, record.note) == (None, "the judge did not reply within 0.3 s")
