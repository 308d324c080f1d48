"""What a gate between rounds saves: by hand, against the served monitor, and where entropy tells nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.artifacts import Artifacts
from decoding.fakes import TableModel
from decoding.model import ModelPool
from tests.decoding.step_models import ID, VOCAB, answer, ids, pool, text
from training.entropy_gate import calibrate_enough
from training.entropy_rounds import Round, all_rounds, savings
from training.length_data import Source
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

CUE = "?"


def reconsidering(sure_when_wrong: bool = False) -> ModelPool:
    """Answers even numbers with "a", odd ones first with "b", unsurely, and with "a" when it reconsiders.

    Args:
        sure_when_wrong: whether "b" is as sure as "a": entropy tells nothing then.
    """

    def logits(tokens: list[int]) -> torch.Tensor:
        number, *rounds = text(tokens).split("?")
        row = torch.full((VOCAB,), -60.0)
        if rounds[-1]:
            row[ID["$"]] = 0.0
        elif int(number) % 2 and len(rounds) == 1:
            row[ID["b"]] = 0.0
            row[ID["c"]] = -60.0 if sure_when_wrong else -0.5
        else:
            row[ID["a"]] = 0.0
        return row

    return pool(TableModel("small", logits, VOCAB), TableModel("large", logits, VOCAB))


def number(index: int) -> int:
    """Each twice in a row: every other prompt is calibrated on, the rest reported."""
    return index // 2 % 10


def source(count: int) -> Source:
    prompts = [ids(f"{number(index)}?") for index in range(count)]
    return Source(prompts, SamplingParams(temperature=0.0, max_tokens=4), frozenset({ID["$"]}))


def is_right(index: int, tokens: tuple[int, ...]) -> bool:
    return text(list(tokens)).rstrip("$")[-1] == "a"


async def test_every_round_is_told_apart() -> None:
    even, odd = await all_rounds(reconsidering(), source(8), [4, 6], is_right, 20, 3, CUE)
    assert [(each.tokens, each.right) for each in even] == [(2, True), (3, True), (3, True)]
    assert [(each.tokens, each.right) for each in odd] == [(2, False), (3, True), (3, True)]
    assert [each.entropy for each in even] == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    share = 1 / (1 + math.exp(-0.5))
    unsure = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert [each.entropy for each in odd] == pytest.approx([unsure / 2, 0.0, 0.0], abs=1e-6)


async def test_savings_by_hand() -> None:
    answers = await all_rounds(reconsidering(), source(8), [4, 6], is_right, 20, 3, CUE)
    gated = savings(answers, 0.1)
    assert gated.saved.value == pytest.approx(1 - (2 + 5) / 16)
    assert (gated.accuracy.value, gated.accuracy_all.value, gated.difference.value) == (1.0, 1.0, 0.0)
    assert gated.rounds == 1.5
    always = savings(answers, math.inf)
    assert always.saved.value == pytest.approx(12 / 16)
    assert (always.accuracy.value, always.difference.value, always.rounds) == (0.5, -0.5, 1.0)
    never = savings(answers, -1.0)
    assert (never.saved.value, never.difference.value, never.rounds) == (0.0, 0.0, 3.0)


def test_more_is_saved_at_a_higher_threshold_and_intervals_hold_the_value() -> None:
    answers = [
        [Round(0.1 * (place % 7), 3, place % 3 > 0), Round(0.05 * (place % 5), 4, place % 4 > 0)] for place in range(60)
    ]
    found = [savings(answers, threshold) for threshold in (-1.0, 0.0, 0.2, 0.4, 1.0)]
    assert all(low.saved.value <= high.saved.value for low, high in pairwise(found))
    for each in found:
        for span in (each.saved, each.accuracy, each.accuracy_all, each.difference):
            assert span.low <= span.value <= span.high


@pytest.mark.parametrize("index", [4, 6])
async def test_the_monitor_stops_where_the_count_says(index: int) -> None:
    """The text served with a threshold is that of the first rounds of an answer that never stops."""
    models = reconsidering()
    [rounds] = await all_rounds(models, source(8), [index], is_right, 20, 3, CUE)
    for threshold in (-1.0, 0.1, 1.0):
        params = {"monitor": {"name": "enough", "cue": CUE, "rounds": 3, "threshold": threshold}}
        seq, _, _ = await answer(models, "monitored", params, f"{number(index)}?", max_tokens=20)
        spent = savings([rounds], threshold)
        assert len(seq.generated) == round(sum(each.tokens for each in rounds) * (1 - spent.saved.value))
        assert is_right(index, tuple(token.id for token in seq.generated)) == bool(spent.accuracy.value)


async def test_where_entropy_tells_right_from_wrong_stopping_costs_nothing_and_elsewhere_it_does() -> None:
    """The paper's claim, both ways: of a model that is as sure of its mistakes the effect size is 0."""
    made = await calibrate_enough(reconsidering(), source(40), is_right, top=20, rounds=3, cue=CUE)
    found = made.reports["scale_free"].against_all_rounds
    assert found is not None
    assert made.gate.effect_size > 5.0
    assert found.saved.value > 0.4
    assert found.difference.value == 0.0
    models = reconsidering(sure_when_wrong=True)
    sure = await calibrate_enough(models, source(40), is_right, top=20, rounds=3, cue=CUE)
    assert abs(sure.gate.effect_size) < 0.1
    answers = await all_rounds(models, source(40), [*range(1, 40, 2)], is_right, 20, 3, CUE)
    assert savings(answers, sure.gate.thresholds["mean"] + 1e-9).difference.high < 0.0


async def test_where_no_answer_is_sure_enough_there_is_no_accuracy_and_the_report_is_json() -> None:
    """Calibrated on right answers that are sure and wrong ones that are not; all the others are unsure."""
    asked = replace(source(12), prompts=[ids(f"{1 if index % 2 else index // 2 % 2}?") for index in range(12)])
    made = await calibrate_enough(reconsidering(), asked, is_right, top=20, rounds=2, cue=CUE)
    found = made.reports["mean"]
    assert (found.stopped, found.accuracy_stopped, found.accuracy) == (0.0, None, 0.0)
    read = json.loads(json.dumps(made.report, allow_nan=False))
    assert read["heldout"]["mean"]["accuracy_stopped"] is None


async def test_a_model_that_spoils_its_answers_by_reconsidering_them_is_named() -> None:
    def only_at_first(index: int, tokens: tuple[int, ...]) -> bool:
        return CUE not in text(list(tokens)) and is_right(index, tokens)

    helped = await calibrate_enough(reconsidering(), source(40), is_right, top=20, rounds=3, cue=CUE)
    assert helped.report["warning"] == ""
    spoilt = await calibrate_enough(
        reconsidering(), source(40), only_at_first, top=20, rounds=3, cue=CUE, keep_harmful=True
    )
    assert "50.0% are right after the first, 0.0% after all" in spoilt.report["warning"]


def right_at_first(index: int, tokens: tuple[int, ...]) -> bool:
    """Of the unsure answers four in five are right, and none is after it was reconsidered."""
    return CUE not in text(list(tokens)) and (number(index) % 2 == 0 or index // 2 % 20 > 4)


async def test_a_gate_that_makes_answers_worse_is_not_written() -> None:
    with pytest.raises(TurnoutError) as refused:
        await calibrate_enough(reconsidering(), source(40), right_at_first, top=20, rounds=3, cue=CUE)
    assert "monitor" in str(refused.value)
    assert "90.0% are right after one round, 50.0% with mean" in str(refused.value)


async def test_a_harmful_threshold_that_was_kept_is_used_only_where_a_request_allows_it(tmp_path: Path) -> None:
    models = reconsidering()
    made = await calibrate_enough(models, source(40), right_at_first, top=20, rounds=3, cue=CUE, keep_harmful=True)
    assert made.artifact.settings["harmful"]["mean"] == pytest.approx(0.5)
    made.artifact.save(tmp_path / "enough.safetensors")
    models.artifacts = Artifacts(tmp_path)
    monitor = {"name": "enough", "cue": CUE, "rounds": 3}
    with pytest.raises(
        TurnoutError, match=r"monitor\.estimator.*'mean'.*90\.0% are right after one round, 50\.0% with"
    ):
        await answer(models, "monitored", {"monitor": monitor}, "1?", max_tokens=20)
    seq, _, _ = await answer(models, "monitored", {"monitor": {**monitor, "harmful": True}}, "1?", max_tokens=20)
    assert text(seq.tokens).count(CUE) == 2


async def test_thresholds_that_do_no_harm_are_kept_without_those_that_do(tmp_path: Path) -> None:
    """Held-out answers of the artifact's own measurement, with two estimators made harmful by hand."""
    models = reconsidering()
    made = await calibrate_enough(models, source(40), is_right, top=20, rounds=3, cue=CUE)
    assert made.artifact.settings["harmful"] == {}
    settings = {**made.artifact.settings, "harmful": {"mean": 0.25}}
    settings["thresholds"] = {name: each for name, each in settings["thresholds"].items() if name != "mean"}
    replace(made.artifact, settings=settings).save(tmp_path / "enough.safetensors")
    models.artifacts = Artifacts(tmp_path)
    for harmful in (False, True):
        monitor: dict[str, Any] = {"name": "enough", "cue": CUE, "harmful": harmful}
        with pytest.raises(TurnoutError, match="harmless are: bayes, information, scale_free"):
            await answer(models, "monitored", {"monitor": monitor}, "1?", max_tokens=20)
    monitor = {"name": "enough", "cue": CUE, "rounds": 3, "estimator": "scale_free"}
    seq, _, _ = await answer(models, "monitored", {"monitor": monitor}, "1?", max_tokens=20)
    assert is_right(1, tuple(seq.tokens))
