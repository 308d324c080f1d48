"""SmolLM2 on short questions: doubts about its answers, and votes among a few samples."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from benchmarks.answers import aggregators, uncertainty
from benchmarks.answers.drawing import chosen, drawn
from benchmarks.answers.figures import difference, numbers
from benchmarks.answers.prompts import short_questions
from benchmarks.harness import Report, note, signed
from benchmarks.pieces import Section, Values
from benchmarks.strategies import at_once
from benchmarks.verdicts import sentences
from decoding.aggregators.base import make_aggregator
from experiments import real_model
from experiments.stats.intervals import Interval, mean_score
from pool.local_pool import LocalPool
from training.calibration_data import Question
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

SIZES = (1, 4, 8)
MAX_TOKENS = 24
AT_ONCE = 4
QUESTIONS, ASKED = "real-questions", "real-asked"
VOTES = ("majority", "self_certainty")


async def votes(pool: LocalPool, questions: list[Question], sizes: tuple[int, ...]) -> list[Values]:
    """Rows of the votes, and of one sample."""
    sampling = SamplingParams(temperature=aggregators.TEMPERATURE, max_tokens=MAX_TOKENS)
    parts = {name: make_aggregator(PartChoice(name=name)) for name in VOTES}
    rows = {(name, size): aggregators.Row(name, size) for name in VOTES for size in sizes}

    async def one(number: int, each: Question) -> None:
        async with drawn(pool, each, number, sampling, sizes[-1]) as found:
            for (name, size), row in rows.items():
                place, tokens = await chosen(parts[name], found, size)
                row.add(found.right[place], tokens)

    await at_once((one(*each) for each in enumerate(questions)), AT_ONCE)
    return [row.plain for row in rows.values()]


async def measure(name: str, options: Namespace) -> Values:
    """The questions: doubts and votes; or the doubt of the judge that is asked, which takes longest."""
    questions = short_questions(options.questions)
    pool = LocalPool.load(real_model.POOL, real_model.alone())
    try:
        note(f"{len(questions)} questions to {real_model.TITLE}")
        if name == ASKED:
            parts = {"semantic_entropy, asked": PartChoice.of("semantic_entropy", judge="asked")}
            return await uncertainty.doubts_of(pool, questions, parts, SIZES[-1], MAX_TOKENS)
        doubts = await uncertainty.doubts_of(pool, questions, uncertainty.choices({}), SIZES[-1], MAX_TOKENS)
        note("votes")
        return {**doubts, "votes": await votes(pool, questions, SIZES)}
    finally:
        await pool.close()


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """Tables of the doubts, and one of the votes."""
    for name, values in pieces.items():
        if name == ASKED:
            report.text(
                "The same, with the model itself as the judge of entailment; each different text is compared with the"
                " first member of each cluster:"
            )
        else:
            report.text(
                f"{real_model.TITLE} in bfloat16 answers {values['prompts']} bundled questions greedily (capitals,"
                " opposites, sums, products, facts; `benchmarks/answers/questions.jsonl`), with"
                f" {values['samples']} samples at temperature 1. The trained estimators are left out: their recipe"
                " needs more prompts than there are."
            )
        uncertainty.write_areas(report, values)
        if "votes" in values:
            _votes(report, values["votes"])


def _votes(report: Report, rows: list[Values]) -> None:
    right = {(row["aggregator"], row["samples"]): numbers(row["right"]) for row in rows}
    above: dict[str, dict[str, Interval]] = {}
    lines = []
    for row in rows:
        name, size = row["aggregator"], row["samples"]
        less = None
        if size > 1:
            less = difference(right[name, size], right[name, 1])
            above.setdefault(name, {})[f"{size:g}"] = less
        lines.append((row, mean_score(right[name, size]), less))
    columns = {
        "aggregator": lambda line: line[0]["aggregator"],
        "samples": lambda line: line[0]["samples"],
        "accuracy": lambda line: line[1],
        "tokens": lambda line: f"{line[0]['tokens']:.0f}",
        "less one sample's": lambda line: line[2] and signed(line[2]),
    }
    report.text(f"Votes among samples at temperature {aggregators.TEMPERATURE:g}:")
    report.table(None, lines, columns)
    report.text(sentences("one sample", above))


SECTION = Section(
    real_model.TITLE, (QUESTIONS, ASKED), measure, lambda options: {"questions": options.questions}, write
)
