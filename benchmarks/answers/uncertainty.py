"""Uncertainty estimators: whether the greatest doubts are about the wrong answers, by area under the ROC curve."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Mapping

from benchmarks.answers.drawing import new_sequence
from benchmarks.answers.figures import UNKNOWN, area_difference, area_interval, numbers, written
from benchmarks.answers.prompts import Case
from benchmarks.answers.trained import SAMPLES, doubt_readers, load
from benchmarks.harness import Report, note, signed
from benchmarks.pieces import Section, Values
from benchmarks.strategies import at_once
from benchmarks.verdicts import sentences
from decoding.aggregators.base import AnswerSet, Candidate
from decoding.candidates import MARK
from decoding.recorder import watched
from decoding.uncertainty.base import SampledParams, SampledUncertainty, Uncertainty, make_uncertainty
from experiments.stats.intervals import Interval, mean_score
from pool.local_pool import LocalPool
from training.calibration_data import Question
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

MAX_TOKENS = 160
PROMPTS_AT_ONCE = 8
ENTROPY, LOGPROB, LIKELIHOOD = "mean token entropy", "length-normalised log-probability", "log-probability"
BASELINES = (ENTROPY, LOGPROB, LIKELIHOOD)


class Draws(SampledUncertainty):
    """Draws the samples that all estimators look at, as each of them would; measures nothing."""

    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        """See `Uncertainty.measure`."""
        raise NotImplementedError


def choices(artifacts: Mapping[str, str]) -> dict[str, PartChoice]:
    """Estimators that are compared, by name on the page.

    Args:
        artifacts: of those that were trained.
    """
    judge = "final_answer"
    return {
        "semantic_entropy": PartChoice.of("semantic_entropy", judge=judge),
        "semantic_entropy, discrete": PartChoice.of("semantic_entropy", judge=judge, estimator="discrete"),
        "snne": PartChoice(name="snne"),
        "snne, chrf": PartChoice.of("snne", similarity="chrf"),
        **{name: PartChoice.of(name, artifact=artifact) for name, artifact in artifacts.items()},
    }


async def doubts_of(
    pool: LocalPool,
    questions: list[Question],
    parts: Mapping[str, PartChoice],
    samples: int,
    max_tokens: int,
    role: str = "large",
) -> Values:
    """Answer each prompt greedily, and measure every estimator's doubt about it with the same samples.

    Args:
        pool: with artifacts of all parts.
        questions: with judges.
        parts: estimators, by name.
        samples: of each prompt, at temperature 1.
        max_tokens: of an answer.
        role: of the model that answers.
    """
    made: dict[str, Uncertainty] = {name: make_uncertainty(part) for name, part in parts.items()}
    for part in made.values():
        part.check(pool.model_pool)
    models, draws = pool.model_pool, Draws(SampledParams(samples=samples, temperature=1.0))
    model, greedy = models.by_role(role), SamplingParams(temperature=0.0, max_tokens=max_tokens)

    async def one(number: int, each: Question) -> tuple[float, dict[str, float]]:
        assert each.judge is not None
        seq = new_sequence(pool, each.prompt, greedy, number)
        draft = model.fork(seq)
        try:
            tokens = (await model.decode(draft, watched())).tokens
            answer = Candidate.of(draft, 0, models, MARK)
            group = AnswerSet(await draws.samples(seq, model, models), seq.seed, seq, model, models)
            values = await asyncio.gather(*(part.measure(group, answer) for part in made.values()))
        finally:
            for held in (draft, seq):
                model.release(held)
        found = dict(zip(made, values, strict=True))
        found[ENTROPY] = sum(token.entropy_bits or 0.0 for token in tokens) / len(tokens)
        found[LOGPROB], found[LIKELIHOOD] = -answer.mean_logprob, -sum(answer.logprobs)
        return 1.0 - each.judge(answer.text), found

    rows = await at_once((one(*each) for each in enumerate(questions)), PROMPTS_AT_ONCE)
    return {
        "prompts": len(rows),
        "samples": samples,
        "wrong": written(wrong for wrong, _ in rows),
        "doubts": {name: written(doubts[name] for _, doubts in rows) for name in (*BASELINES, *parts)},
    }


async def measure(name: str, options: Namespace) -> Values:
    """One task."""
    case = Case.of(name)
    pool = load(options.artifacts)
    try:
        artifacts, missing = await doubt_readers(pool, options.artifacts, case, options.probing, MAX_TOKENS)
        questions = case.questions(options.prompts)
        note(f"{len(questions)} prompts, {case.title}, {SAMPLES} samples each")
        found = await doubts_of(pool, questions, choices(artifacts), SAMPLES, MAX_TOKENS, case.role)
        return {**found, "missing": missing}
    finally:
        await pool.close()


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """A table for each task, and which doubts are worth something."""
    report.text(
        "A demo model answers greedily; doubt is measured as `abstain` does, with samples at temperature 1"
        " that all sampled estimators share. Area under the ROC curve: the chance that a wrong answer has more doubt"
        " than a right one; 0.5 says nothing. The probe and the key-value bottleneck read hidden states, and are"
        " trained as `turnout train` does on semantic entropies of other prompts of the task; they never see who is"
        " right. Semantic entropy clusters by final answers: the demo models cannot judge entailment. The first three"
        " rows are baselines that read the answer's own tokens and draw nothing. 95% bootstrap intervals over prompts."
    )
    for name, values in pieces.items():
        report.text(f"**{Case.of(name).title}**, {values['prompts']} held-out prompts:")
        write_areas(report, values)


def write_areas(report: Report, values: Values) -> None:
    """A table of areas, and which are surely above chance, and above the best-known baseline."""
    wrong = numbers(values["wrong"])
    doubts = {name: numbers(text) for name, text in values["doubts"].items()}
    if not 0.0 < wrong.mean() < 1.0:
        report.text("All answers are right, or all are wrong: no doubt can tell them apart.")
        return
    above: dict[str, dict[str, Interval]] = {}
    less: dict[str, dict[str, Interval]] = {}
    lines = []
    for name, each in doubts.items():
        area = area_interval(each, wrong)
        to_baseline = UNKNOWN if name == LOGPROB else area_difference(each, doubts[LOGPROB], wrong)
        lines.append((name, area, to_baseline))
        above[name] = {"": Interval(area.value - 0.5, area.low - 0.5, area.high - 0.5)}
        if name != LOGPROB:
            less[name] = {"": to_baseline}
    columns = {
        "estimator": lambda row: row[0],
        "area": lambda row: row[1],
        f"less that of {LOGPROB}": lambda row: None if row[0] == LOGPROB else signed(row[2]),
    }
    report.table(None, lines, columns)
    right = mean_score(1.0 - wrong)
    report.text(
        f"{right.value:.1%} of the answers are right. "
        + sentences("chance", above)
        + " "
        + sentences(f"{LOGPROB}, which draws nothing", less)
    )
    if values.get("missing"):
        report.text("Left out: " + "; ".join(f"{name}: {why}" for name, why in values["missing"].items()) + ".")


SECTION = Section(
    "Uncertainty",
    ("uncertainty-lists-large", "uncertainty-arithmetic-small"),
    measure,
    lambda options: {each: getattr(options, each) for each in ("prompts", "probing")},
    write,
)
