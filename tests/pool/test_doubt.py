"""Doubt and what is measured of answers, through a pool: in the usage, as an abstention, and for several answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decoding.calibration import RAN
from decoding.model import MEASURES
from deployments.fan_out import combine
from deployments.grpc_messages import usage_message
from deployments.openai_format import usage_object
from pool.local_pool import LocalPool
from pool.usage import with_answer
from tests.engine.harness import ask, pair_config
from turnout.calls import Usage
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.errors import TurnoutError
from turnout.types import FinishReason

PROMPT = [65, 66, 67, 68, 69]
SNNE = {"name": "snne", "samples": 3}


def test_measures_of_several_answers_are_their_mean() -> None:
    extra: dict[str, Any] = {}
    for left in ({MEASURES: {"snne": 1.0}}, {}, {MEASURES: {"snne": 2.0, "abstained": 1.0}}):
        extra = with_answer(extra, {RAN: {"share": 0.5}, **left})
    assert extra == {RAN: {"share": 0.5}, MEASURES: {"snne": (1.0, 2.0), "abstained": (1.0,)}}
    nothing = Cost(0.0, 0.0, 0.0)
    report = CostReport(nothing, nothing, 0.0)
    usages = [
        Usage(1, 1, 0, {}, SpeculationMeter(), 0, report, "abstain", {}, 0, 0.0, 0.0, measures=measures)
        for measures in ({"snne": 1.0}, {}, {"snne": 2.0, "abstained": 1.0})
    ]
    assert combine(usages).measures == {"snne": 1.5, "abstained": 1.0}


async def test_doubt_is_reported_and_acted_on(pair_folder: Path) -> None:
    pool = LocalPool.load("pair", pair_config(pair_folder))
    try:
        plain = await ask(pool, PROMPT, "plain")
        told = await ask(pool, PROMPT, "abstain", {"uncertainty": SNNE})
        assert told.texts == plain.texts
        value = told.usage.measures["snne"]
        assert usage_object(told.usage)["turnout"]["measures"] == {"snne": value}
        assert usage_message(told.usage).measures["snne"] == value
        assert told.usage.models["large"].discarded_tokens > 0
        held = await ask(pool, PROMPT, "abstain", {"uncertainty": SNNE, "abstain_above": value - 0.1})
        assert held.texts == ["I am not sure."]
        assert held.reasons == [FinishReason.STOP]
        assert held.usage.measures["abstained"] == 1.0
        silent = {"uncertainty": SNNE, "abstain_above": value - 0.1, "text": ""}
        two = await ask(pool, PROMPT, "abstain", silent, n=2)
        assert two.texts == ["", ""]
        assert two.usage.measures["abstained"] == 1.0
        assert two.reasons == [FinishReason.STOP] * 2
        inner = {"name": "best_of", "k": 2, "rerank": "self_certainty"}
        both = await ask(pool, PROMPT, "abstain", {"uncertainty": SNNE, "inner": inner}, temperature=1.0)
        assert set(both.usage.measures) == {"snne", "self_certainty"}
        with pytest.raises(TurnoutError, match="not known"):
            await ask(pool, PROMPT, "abstain", {"uncertainty": "semantic_entropy_probe"})
        stats = pool.stats()
        assert (stats.sequences, stats.used_blocks) == (0, 0)
    finally:
        await pool.close()
