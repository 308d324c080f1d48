"""Calibrating what decides on whole answers and steps: cascade and step speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.artifacts import Artifacts
from decoding.calibration import RAN
from decoding.drift import STORE, DriftWatch
from decoding.fakes import TableModel
from decoding.methods.cascade import confidence
from decoding.methods.step_speculation import StepSpeculationParams
from decoding.recorder import watched
from decoding.sequence import Sequence
from tests.decoding.step_models import END, answer, ids, line, pool, scripted
from tests.decoding.step_models import text as text_of
from tests.training.test_knob_calibration import bench, questions
from training.calibration_data import Question, QuestionSet
from training.knob_calibration import Calibrator, Target
from training.question_runs import Bench
from turnout.errors import TurnoutError
from turnout.registry import all_methods, get_method, load, names, slots
from turnout.types import SamplingParams


async def test_a_cascades_threshold_gives_the_share_on_fresh_questions() -> None:
    asked = questions(0, 144)
    short = replace(bench(), sampling=SamplingParams(max_tokens=4))
    fixed = {"confidence": "entropy", "keep_cut": True}
    found = (await Calibrator(short, asked, "cascade", fixed, 3).measure(Target(large_share=0.4))).calibration
    shares = [point.large_share.value for point in found.points]
    thresholds = [point.value for point in found.points]
    assert shares == sorted(shares)
    assert thresholds == sorted(thresholds)
    assert shares[0] == 0.0
    assert shares[-1] > 0.95
    assert found.fixed == fixed
    setting = {**fixed, "threshold": found.setting(found.chosen)}
    runs = [await replace(short, seed=seed).run(asked.questions, "cascade", setting) for seed in (1, 2)]
    assert sum(run.large_share for run in runs) / len(runs) == pytest.approx(0.4, abs=0.08)


async def test_a_cascade_counts_what_it_compares_and_says_where_its_threshold_is_from(tmp_path: Path) -> None:
    short = replace(bench(), sampling=SamplingParams(max_tokens=8))
    calibrator = Calibrator(short, questions(0, 120), "cascade", {"keep_cut": True}, 3)
    found = (await calibrator.measure(Target(large_share=0.4))).calibration
    models = replace(short.models, artifacts=Artifacts(tmp_path))
    digests = {"small": models.small.digest, "large": models.large.digest}
    made = found.to_artifact(digests, "test")
    made.save(tmp_path / "mine.safetensors")
    info = get_method("cascade")
    sides = set()
    for place, question in enumerate(questions(0, 20).questions):
        request = short._request(place, question, None)
        async for _ in info.run(request, models, info.parse({"calibration": "mine", "large_share": 0.5})):
            pass
        threshold = request.extra[RAN]["threshold"]
        assert request.extra[RAN] == {"confidence": "logprob", "keep_cut": True, "threshold": threshold}
        assert request.notes[0].startswith(f"calibration mine, version {made.version}: threshold ")
        draft = Sequence(
            request.sequence.tokens[: request.sequence.num_prompt_tokens],
            request.sequence.sampling,
            request.sequence.seed,
        )
        await models.small.decode(draft, watched())
        kept = confidence(draft.generated, "logprob") >= threshold
        assert {token.source for token in request.sequence.generated} == {"small" if kept else "large"}
        sides.add(kept)
    assert sides == {True, False}
    watch: DriftWatch = models.small.stores.open(STORE, "", dict)["mine"]
    assert sum(sum(each.counts) for each in watch._answers) == 20


def steps_bench(models: Any) -> Bench:
    return Bench(
        models,
        encode=ids,
        decode=lambda tokens: text_of(list(tokens)),
        eos_ids=frozenset({END}),
        sampling=SamplingParams(max_tokens=32, temperature=0.0),
    )


def graded() -> TableModel:
    """Writes lines of "b", and grades the n-th line of an answer to "?...?" by n and the length of the question."""

    def script(written: str) -> str:
        if "\n" in written and written.endswith("?"):
            asked = len(written) - len(written.lstrip("?"))
            return str((written.count("\n") * 3 + asked) % 10)
        return line("b")(written)

    return scripted("large", script, num_parameters=10)


SCORER = {"name": "self_grade", "question": "?"}


async def test_a_grade_is_calibrated_over_whole_steps() -> None:
    models = pool(scripted("small", line("a")), graded())
    asked = QuestionSet(tuple(Question("?" * (1 + n % 20), None) for n in range(20)), "agreement", "here", "0" * 32)
    calibrator = Calibrator(steps_bench(models), asked, "step_speculation", {"scorer": SCORER}, 6)
    found = (await calibrator.measure(Target(large_share=0.5))).calibration
    assert found.points[0].large_share.value == 0.0
    assert found.points[-1].large_share.value > 0.6
    assert found.fixed["scorer"] == SCORER
    setting = found.setting(found.chosen)
    assert 2.0 < setting < 8.0
    run = await calibrator.bench.run(asked.questions, "step_speculation", {"scorer": SCORER, "threshold": setting})
    assert run.large_share == pytest.approx(0.5, abs=0.12)


@pytest.mark.parametrize(("threshold", "role"), [(0.0, "small"), (10.0, "large")])
async def test_the_threshold_beside_the_scorer_is_the_scorers_own(threshold: float, role: str) -> None:
    models = pool(scripted("small", line("a")), graded())
    beside, _, _ = await answer(models, "step_speculation", {"scorer": SCORER, "threshold": threshold})
    within, _, _ = await answer(models, "step_speculation", {"scorer": {**SCORER, "threshold": threshold}})
    assert beside.tokens == within.tokens
    assert {token.source for token in beside.generated} == {role}


def test_a_rewards_threshold_goes_by_the_same_name() -> None:
    params = get_method("step_speculation").parse({"scorer": "reward_model", "threshold": 0.4})
    assert isinstance(params, StepSpeculationParams)
    assert params.judge().params.delta == 0.4


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"scorer": {**SCORER, "threshold": 5}, "threshold": 5}, "method.params.scorer.threshold"),
        ({"scorer": {"name": "reward_model", "delta": 0.5}, "calibration": "x"}, "method.params.scorer.delta"),
        ({"scorer": "reward_model", "threshold": 3.0}, "method.params.scorer.delta"),
        ({"threshold": 3.0, "calibration": "x"}, "method.params"),
    ],
)
def test_two_thresholds_are_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(TurnoutError) as caught:
        get_method("step_speculation").parse(params)
    assert caught.value.field.startswith(field)


# Thresholds that no calibration sets, and why.
NOT_CALIBRATED = {
    "threshold_down": "the band's other end: fixed while threshold is calibrated",
    "lengths": "how long a draft is changes the speed and no text; `turnout train disco` and `bandits` tune it",
    "drafters": "as lengths",
    "verifiers": "judge, typical: trained or set with their artifact; `turnout train judge` reports the trade",
    "monitors": "a share of the large model is not theirs to set: enough's comes from the entropies of right and wrong"
    " answers (`turnout train enough`, four estimators and no target), and says when to stop",
    "contrast": "pmi's and uscd's are nats and deviations of the authors; no second model writes by them",
    "processors": "xtc's is the caller's taste; there is nothing to be right about",
    "scorers": "set by step_speculation's own threshold",
    "selectors": "speed only",
}


def test_every_threshold_of_a_method_is_a_knob_or_listed() -> None:
    for info in all_methods():
        knob = getattr(info.params, "knob", None)
        for name in info.params.model_fields:
            if "threshold" in name or name == "delta":
                assert (knob is not None and knob.name == name) or name in NOT_CALIBRATED, (info.name, name)
    for slot in slots():
        for name in names(f"decoding.{slot}"):
            fields = load(f"decoding.{slot}", name, "part").PART.Params.model_fields
            if any("threshold" in field or field == "delta" for field in fields):
                assert slot in NOT_CALIBRATED, (slot, name)
