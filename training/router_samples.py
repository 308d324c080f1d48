"""What held-out samples say of allocation by predicted difficulty, and of a model's own confidence."""

from __future__ import annotations

import random
from dataclasses import asdict
from itertools import combinations
from math import comb
from typing import Any, Literal

import numpy as np

from decoding.aggregators.base import best
from decoding.aggregators.majority import most_voted
from router.allocation import Bins, allocate, marginals, right_among
from training.calibration import auc
from training.router_measures import Floats, Ints, Routed, bootstrap, recovered, threshold_for
from training.router_outcomes import Outcome, Role, Sample

Rerank = Literal["majority", "logprob"]
RERANKS: tuple[Rerank, Rerank] = ("majority", "logprob")
ROUNDS = 200
PICKS = 256


def answered_by(rows: list[Outcome], role: Role) -> Floats | None:
    """[n, most] chance that a request is answered, by number of samples: one is right among that many of those drawn.

    Args:
        rows: outcomes with samples.
        role: whose samples.

    Returns:
        None where rewards are not 0 and 1, or fewer than two samples were drawn somewhere.
    """
    rewards = [[sample.reward for sample in row.samples(role)] for row in rows]
    most = min(len(each) for each in rewards)
    if most < 2 or any(value not in (0.0, 1.0) for each in rewards for value in each):
        return None
    return np.array(
        [[right_among(int(sum(each)), len(each), b) for b in range(1, most + 1)] for each in rewards], dtype=np.float64
    )


def shown_by(rows: list[Outcome], role: Role, rerank: Rerank) -> Floats | None:
    """[n, most] chance that the answer which the method `best_of` shows is right, by number of samples.

    Over all ways to pick that many of those drawn, or over `PICKS` of them where there are more.

    Args:
        rows: outcomes with samples.
        role: whose samples.
        rerank: which answer is shown: one with the most common final answer, or the likeliest.

    Returns:
        None where `answered_by` has none, or a sample lacks what is needed to choose.
    """
    table = answered_by(rows, role)
    drawn = [row.samples(role) for row in rows]
    if table is None or any(
        each.logprob is None or (each.answer is None and rerank == "majority") for samples in drawn for each in samples
    ):
        return None
    sizes = range(1, table.shape[1] + 1)
    return np.array([[_shown_right(samples, size, rerank) for size in sizes] for samples in drawn], dtype=np.float64)


def _shown_right(samples: tuple[Sample, ...], size: int, rerank: Rerank) -> float:
    if comb(len(samples), size) <= PICKS:
        picks = list(combinations(samples, size))
    else:
        rng = random.Random(size)
        picks = [tuple(rng.sample(samples, size)) for _ in range(PICKS)]
    total = 0.0
    for pick in picks:
        values, answers = [each.logprob or 0.0 for each in pick], [each.answer or "" for each in pick]
        total += pick[most_voted(values, answers) if rerank == "majority" else best(values)].reward
    return total / len(picks)


def allocated(table: Floats, predicted: Floats, average: int) -> dict[str, list[int]]:
    """Samples of each request under a budget, by way of sharing it out; every request gets one at least.

    Args:
        table: [n, most]; see `answered_by`.
        predicted: [n] chances of a right sample.
        average: samples a request, of the budget.

    Returns:
        `uniform`; `predicted`, over all requests at once; `bins`, as for requests that come one by one; `oracle`.
    """
    count, most = table.shape
    bins = Bins.solve(predicted.tolist(), average, most, least=1)
    return {
        "uniform": [average] * count,
        "predicted": allocate([marginals(float(chance), most) for chance in predicted], average * count, least=1),
        "bins": [bins.of(float(chance)) for chance in predicted],
        "oracle": allocate([np.diff(line, prepend=0.0).tolist() for line in table], average * count, least=1),
    }


def allocation_report(rows: list[Outcome], role: Role, predicted: Floats, seed: int = 0) -> dict[str, Any] | None:
    """Adaptive against uniform best-of-k on samples that were drawn once (paper #45), as plain values.

    A request counts as answered where one of its samples is right, averaged over all ways to pick that many of those
    drawn; it gets at least one. That is what a perfect judge of answers would show: `majority` and `logprob` next to it
    are what the method `best_of` shows, where the file tells. Budgets are samples a request.

    Args:
        rows: held-out outcomes.
        role: whose samples.
        predicted: [n] chances of a right sample.
        seed: of the bootstrap.

    Returns:
        None where `answered_by` has none.
    """
    table = answered_by(rows, role)
    if table is None:
        return None
    most = table.shape[1]
    shown = {rerank: shown_by(rows, role, rerank) for rerank in RERANKS}
    kept: dict[str, Floats] = {"answered": table}
    kept |= {name: each for name, each in shown.items() if each is not None}
    budgets = []
    for average in range(1, most + 1):
        line: dict[str, Any] = {"average": average}
        for name, counts in allocated(table, predicted, average).items():
            found = {what: _answered(each, counts, seed) for what, each in kept.items()}
            line[name] = {"samples": float(np.mean(counts)), **found}
        budgets.append(line)
    return {"most": most, "budgets": budgets}


def _answered(table: Floats, counts: list[int], seed: int) -> dict[str, float]:
    values = table[np.arange(len(table)), np.array(counts) - 1]

    def mean(at: Ints) -> float:
        return float(values[at].mean())

    return asdict(bootstrap(len(values), mean, seed, ROUNDS))


def confidence_report(rows: list[Outcome], routed: Routed, seed: int = 0) -> dict[str, Any] | None:
    """What escalating by the small model's own confidence in its answer is worth, for `cascade`, as plain values.

    Of several answers to a prompt the first one is looked at: `cascade` sees one, and means of several tell more.

    Args:
        rows: held-out outcomes.
        routed: the same rows, routed by the probe.
        seed: of the bootstrap.

    Returns:
        By kind of confidence: how well it ranks right answers, the threshold for each share of requests escalated,
        and how much of the oracle's gain it recovers; the small model's answer is paid for in any case. None where
        the file has neither log-probabilities nor entropies.
    """
    first = [row.samples("small")[0] for row in rows]
    kinds: dict[str, list[float | None]] = {
        "logprob": [each.logprob for each in first],
        "entropy": [None if each.entropy_bits is None else -each.entropy_bits for each in first],
    }
    right = np.array([each.reward for each in first], dtype=np.float64)
    report = {}
    for name, found in kinds.items():
        if None in found:
            continue
        sure = np.array(found, dtype=np.float64)
        doubt = Routed(right, routed.large, -sure, np.zeros(len(sure)), routed.dear)
        ranked = np.sort(-sure)[::-1]
        report[name] = {
            "auc": asdict(bootstrap(len(sure), lambda at, sure=sure: auc(sure[at], right[at]), seed, ROUNDS)),  # type: ignore[misc]
            "recovered": asdict(bootstrap(len(sure), lambda at, doubt=doubt: recovered(doubt.at(at)), seed, ROUNDS)),  # type: ignore[misc]
            "thresholds": {f"{share:.1f}": -threshold_for(ranked, share) for share in (0.1, 0.2, 0.3, 0.4, 0.5)},
        }
    return report or None


def kinds_report(rows: list[Outcome], routed: Routed, gains: Floats) -> dict[str, dict[str, float]]:
    """Held-out prompts by the kind the file gives them: how many, mean rewards, mean gain predicted ([n]) and true."""
    report = {}
    for kind in sorted({row.kind for row in rows}):
        places = np.array([place for place, row in enumerate(rows) if row.kind == kind], dtype=np.int64)
        part = routed.at(places)
        report[kind] = {
            "num_prompts": len(part.small),
            "small": float(part.small.mean()),
            "large": float(part.large.mean()),
            "gain": float(part.gain.mean()),
            "predicted_gain": float(gains[places].mean()),
        }
    return report
