"""Aggregators on candidates that were drawn once: accuracy and tokens by number of samples, and adaptive numbers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.answers.drawing import chosen, drawn, new_sequence
from benchmarks.answers.figures import difference, numbers, written
from benchmarks.answers.prompts import Case, others, question
from benchmarks.answers.trained import load, rankers
from benchmarks.harness import Report, note, signed
from benchmarks.pieces import Section, Values
from benchmarks.strategies import at_once
from benchmarks.verdicts import sentences
from decoding.aggregators.base import Aggregator, make_aggregator, make_valued
from decoding.model import Request
from experiments.stats.intervals import Floats, Interval, mean_score
from pool.local_pool import LocalPool
from router.base import Asked
from router.policies.adaptive_best_of import AdaptiveBestOfPolicy
from training.calibration_data import Question
from training.nbest import Scored, tune_weights
from turnout.calls import ChatMessage, Chunk, GenerateCall, Usage
from turnout.part_choice import PartChoice
from turnout.types import SamplingParams

SIZES = (1, 2, 4, 8, 16)
AVERAGES = (2, 4, 8)  # samples a request, of adaptive numbers
TEMPERATURE, MAX_TOKENS = 0.8, 160
PROMPTS_AT_ONCE = 8
SERVED_PROMPTS, SERVED_SIZE = 6, 4
TUNING_SIZE = 8
MAJORITY, ANY = "majority", "one of them is right"
TERMS = (
    PartChoice(name="logprob"),
    PartChoice.of("self_certainty", vote=False),
    PartChoice(name="mbr"),
    PartChoice(name="reward"),
)


def choices(weights: list[float], artifacts: Mapping[str, str]) -> dict[str, PartChoice]:
    """Aggregators that are compared, by name on the page.

    Args:
        weights: of `TERMS`, for nbest.
        artifacts: of those that were trained.
    """
    terms = [
        {"part": part.model_dump(mode="json"), "weight": weight} for part, weight in zip(TERMS, weights, strict=True)
    ]
    return {
        MAJORITY: PartChoice(name="majority"),
        "majority, early": PartChoice.of("majority", early=True),
        "self_certainty": PartChoice(name="self_certainty"),
        "self_certainty, no vote": PartChoice.of("self_certainty", vote=False),
        "complexity": PartChoice(name="complexity"),
        "mbr": PartChoice(name="mbr"),
        "mbr, embedding": PartChoice.of("mbr", utility="embedding"),
        "logprob": PartChoice(name="logprob"),
        "reward": PartChoice(name="reward"),
        "nbest": PartChoice.of("nbest", terms=terms),
        "likelihood_utility": PartChoice(name="likelihood_utility"),
        "first_finish": PartChoice(name="first_finish"),
        **{name: PartChoice.of(name, artifact=artifact) for name, artifact in artifacts.items()},
    }


@dataclass(slots=True)
class Row:
    """An aggregator with a number of samples: how right each prompt's choice is, and tokens written for it."""

    aggregator: str
    samples: float
    right: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def add(self, right: float, tokens: float) -> None:
        """Add a prompt."""
        self.right.append(right)
        self.tokens.append(tokens)

    @property
    def plain(self) -> Values:
        """For the JSON file: one digit or number a prompt, and mean tokens."""
        return {
            "aggregator": self.aggregator,
            "samples": self.samples,
            "right": written(self.right),
            "tokens": float(np.mean(self.tokens)),
        }


async def tuned(pool: LocalPool, case: Case, count: int, sampling: SamplingParams) -> list[float]:
    """Weights of nbest, by the accuracy of what it shows on other prompts."""
    parts = [make_valued(part, "terms") for part in TERMS]
    for part in parts:
        part.check(pool.model_pool)

    async def one(number: int, each: Question) -> Scored:
        async with drawn(pool, each, number, sampling, TUNING_SIZE, case.role) as found:
            columns = [await part.values(found.first(TUNING_SIZE)) for part in parts]
            return Scored(tuple(zip(*columns, strict=True)), tuple(found.right.tolist()))

    problems = [question(case.task, problem) for problem in others(case.task, count)]
    inputs = await at_once((one(*each) for each in enumerate(problems)), PROMPTS_AT_ONCE)
    return tune_weights(inputs)[0]


async def adaptive(pool: LocalPool, policies: list[AdaptiveBestOfPolicy], prompt: str, seed: int) -> list[int]:
    """Samples that each policy gives a request."""
    seq = new_sequence(pool, prompt, SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS), seed)
    request = Asked(Request(f"adaptive-{seed}", seq), pool.name, "default", "", prompt)
    try:
        decisions = [await policy.decide(request, pool.model_pool) for policy in policies]
    finally:
        pool.model_pool.small.release(seq)
    return [int(decision.scores["samples"]) for decision in decisions]


def policies_of(pool: LocalPool, role: str, most: int) -> list[AdaptiveBestOfPolicy]:
    """Adaptive best-of-k (paper #45) by the shipped artifact, one for each average that `most` allows."""
    made = []
    for average in AVERAGES:
        if average < most:
            params = {"artifact": "samples", "model": role, "average": average, "most": most}
            made.append(AdaptiveBestOfPolicy(AdaptiveBestOfPolicy.Params.model_validate(params)))
            made[-1].check(pool.model_pool)
    return made


async def served(
    pool: LocalPool,
    asked: Question,
    seed: int,
    sampling: SamplingParams,
    rerank: PartChoice,
    size: int,
    role: str = "large",
) -> tuple[str, int]:
    """Ask the pool for the same choice: text, and tokens written, discarded ones included."""
    call = GenerateCall(
        f"served-{rerank.name}-{seed}",
        pool.name,
        sampling.model_copy(update={"seed": seed}),
        messages=(ChatMessage("user", asked.prompt),),
        method="best_of",
        params={"model": role, "k": size, "rerank": rerank.model_dump(mode="json")},
    )
    text, tokens = "", 0
    async for event in pool.generate(call):
        if isinstance(event, Chunk):
            text += event.text
        elif isinstance(event, Usage):
            tokens = sum(meter.written_tokens for meter in event.models.values())
    return text, tokens


def checked(pool: LocalPool, part: PartChoice) -> Aggregator:
    """Make an aggregator, with its artifact opened."""
    made = make_aggregator(part)
    made.check(pool.model_pool)
    return made


async def compare(
    pool: LocalPool,
    questions: list[Question],
    parts: Mapping[str, PartChoice],
    sizes: tuple[int, ...],
    policies: list[AdaptiveBestOfPolicy],
    role: str = "large",
) -> Values:
    """Draw candidates of each prompt once, and let every aggregator choose among the first of them.

    Args:
        pool: with artifacts of all parts.
        questions: with judges.
        parts: by name; majority is among them.
        sizes: numbers of samples, rising from 1.
        policies: of adaptive numbers.
        role: of the model that answers.
    """
    made = {name: checked(pool, part) for name, part in parts.items()}
    rows = {(name, size): Row(name, size) for name in (*parts, ANY) for size in sizes[1:]}
    single = Row("one sample", 1)
    shares = [Row(f"adaptive, {policy.params.average:g} on average", 0.0) for policy in policies]
    counts: list[list[int]] = []
    same: dict[str, list[float]] = {name: [] for name in parts}
    tokens: dict[str, list[float]] = {name: [] for name in parts}
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS)

    async def one(number: int, each: Question) -> None:
        given = await adaptive(pool, policies, each.prompt, number)
        async with drawn(pool, each, number, sampling, sizes[-1], role) as found:
            picked = {key: await chosen(made[key[0]], found, key[1]) for key in rows if key[0] != ANY}
            by_need = [await chosen(made[MAJORITY], found, count) for count in given]
        counts.append(given)
        single.add(found.right[0], found.lengths[0])
        for key, (place, written_tokens) in picked.items():
            rows[key].add(found.right[place], written_tokens)
        for size in sizes[1:]:
            rows[ANY, size].add(found.right[:size].max(), sum(found.lengths[:size]))
        for row, (place, written_tokens) in zip(shares, by_need, strict=True):
            row.add(found.right[place], written_tokens)
        if number < SERVED_PROMPTS:
            size = max(size for size in sizes if size <= SERVED_SIZE)
            for name, part in parts.items():
                place, expected = picked[name, size]
                text, spent = await served(pool, each, number, sampling, part, size, role)
                same[name].append(float(text.strip() == found.group.answers[place].text.strip()))
                tokens[name].append(spent / expected)

    await at_once((one(*each) for each in enumerate(questions)), PROMPTS_AT_ONCE)
    for row, column in zip(shares, zip(*counts, strict=True), strict=True):
        row.samples = float(np.mean(column))
    return {
        "prompts": len(questions),
        "sizes": list(sizes),
        "rows": [row.plain for row in (single, *rows.values())],
        "adaptive": [row.plain for row in shares],
        "averages": [policy.params.average for policy in policies],
        "served": {name: {"same": written(same[name]), "tokens": written(tokens[name])} for name in parts},
    }


async def measure(name: str, options: Namespace) -> Values:
    """One task."""
    case = Case.of(name)
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    pool = load(options.artifacts)
    try:
        artifacts, missing = await rankers(pool, options.artifacts, case.role, options.training)
        note(f"tuning nbest on {options.tuning} other prompts")
        weights = await tuned(pool, case, options.tuning, sampling)
        questions = case.questions(options.prompts)
        note(f"{len(questions)} prompts, {case.title}, {options.samples} samples each")
        sizes = tuple(size for size in SIZES if size <= options.samples)
        found = await compare(
            pool, questions, choices(weights, artifacts), sizes, policies_of(pool, case.role, sizes[-1]), case.role
        )
        return {**found, "weights": weights, "missing": missing}
    finally:
        await pool.close()


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """A table for each task, and what helps."""
    report.text(
        f"A demo model answers at temperature {TEMPERATURE:g}; the candidates of a prompt are drawn once, with"
        " the seeds of `best_of`, and every aggregator chooses among the first k of them. Tokens are those written for"
        " a prompt, discarded ones included; an aggregator that stops early is charged as if all its samples were"
        " written one token a step. Differences are means over prompts with 95% bootstrap intervals that draw both"
        " sides of a prompt together. They are not corrected for the number of comparisons: of a hundred differences"
        " that are none, some five lie outside. uni_encoder, rank_gen and daemon are trained on worked answers to"
        " other prompts (uni_encoder's negatives are answers to others of them, not wrong answers to the same), nbest"
        " is tuned on others, the reward model is the shipped one, of arithmetic."
    )
    for name, values in pieces.items():
        _task(report, Case.of(name).title, values)


def _task(report: Report, title: str, values: Values) -> None:
    rows = {(row["aggregator"], row["samples"]): row for row in values["rows"]}
    right = {key: numbers(row["right"]) for key, row in rows.items()}
    alone = right["one sample", 1]
    report.text(f"**{title}**, {values['prompts']} held-out prompts:")
    above_one: dict[str, dict[str, Interval]] = {}
    above_majority: dict[str, dict[str, Interval]] = {}
    lines = [_line("one sample", 1, alone, rows["one sample", 1]["tokens"], None, None)]
    for (name, size), found in right.items():
        if size == 1:
            continue
        one = difference(found, alone)
        most = difference(found, right[MAJORITY, size]) if name != MAJORITY else None
        lines.append(_line(name, size, found, rows[name, size]["tokens"], one, most))
        if name != ANY:
            above_one.setdefault(name, {})[f"{size:g}"] = one
            if most is not None:
                above_majority.setdefault(name, {})[f"{size:g}"] = most
    _table(report, lines)
    report.text(sentences("one sample", above_one))
    report.text(sentences("majority with as many samples", above_majority))
    _adaptive(report, values, right)
    report.text(_served(values))
    if values["missing"]:
        report.text("Left out: " + "; ".join(f"{name}: {why}" for name, why in values["missing"].items()) + ".")


def _served(values: Values) -> str:
    """Say whether the pool shows the choices that were worked out, and writes as many tokens for them."""
    found = {name: {key: numbers(text).mean() for key, text in each.items()} for name, each in values["served"].items()}
    differ = [f"{name} {each['same']:.0%}" for name, each in found.items() if each["same"] < 1.0]
    spent = [f"{name} {each['tokens']:.2f}" for name, each in found.items() if abs(each["tokens"] - 1.0) >= 0.005]
    weights = [f"{part.name} {weight:g}" for part, weight in zip(TERMS, values["weights"], strict=True)]
    return (
        f"Asked for {SERVED_PROMPTS} of these prompts, the pool shows the same answer"
        f" {'but for a part of ' + ', '.join(differ) if differ else 'by every aggregator'}; tokens that it writes over"
        f" those worked out: {', '.join(spent) or '1.00 for all'}. Weights of nbest: {', '.join(weights)}."
    )


def _adaptive(report: Report, values: Values, right: Mapping[tuple[str, float], Floats]) -> None:
    """Adaptive numbers of samples next to the same number for every prompt."""
    if not values["adaptive"]:
        return
    lines, above = [], {}
    for row, average in zip(values["adaptive"], values["averages"], strict=True):
        found = numbers(row["right"])
        one, most = difference(found, right["one sample", 1]), difference(found, right[MAJORITY, average])
        lines.append(_line(row["aggregator"], row["samples"], found, row["tokens"], one, most))
        above[row["aggregator"]] = {f"{average:g}": most}
    report.text(
        "Adaptive best-of-k (#45): the shipped artifact predicts each prompt's chance of a right sample, and says how"
        " many it gets; majority chooses. Compared with as many for every prompt:"
    )
    _table(report, lines)
    report.text(sentences("majority with its average for every prompt", above))


def _line(
    name: str, size: float, right: Floats, tokens: float, one: Interval | None, most: Interval | None
) -> dict[str, Any]:
    return {"name": name, "size": size, "right": mean_score(right), "tokens": tokens, "one": one, "most": most}


def _table(report: Report, lines: list[dict[str, Any]]) -> None:
    columns = {
        "aggregator": lambda row: row["name"],
        "samples": lambda row: f"{row['size']:.3g}",
        "accuracy": lambda row: row["right"],
        "tokens": lambda row: f"{row['tokens']:.0f}",
        "less one sample's": lambda row: row["one"] and signed(row["one"]),
        "less majority's": lambda row: row["most"] and signed(row["most"]),
    }
    report.table(None, lines, columns)


SECTION = Section(
    "Aggregators",
    ("aggregators-lists-large", "aggregators-arithmetic-small", "aggregators-arithmetic-large"),
    measure,
    lambda options: {each: getattr(options, each) for each in ("prompts", "samples", "training", "tuning")},
    write,
)
