"""Calibration of the monitor `enough`: mean entropies of right and wrong answers, and thresholds between them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.artifacts import Artifact
from decoding.model import ModelPool
from decoding.monitors.enough import EnoughParams, entropy_nats
from training.entropy_rounds import Savings, all_rounds, savings
from training.length_data import Source
from training.length_predictors import Advance
from turnout.errors import invalid

Floats = NDArray[np.float64]
AT_ONCE = 8


@dataclass(frozen=True)
class Gate:
    """Thresholds on mean entropy, in nats, and what they rest on.

    Attributes:
        thresholds: by estimator.
        effect_size: Cohen's d between wrong and right answers: difference of means over the pooled deviation.
        num_right: answers that were right.
        num_wrong: answers that were wrong.
    """

    thresholds: dict[str, float]
    effect_size: float
    num_right: int
    num_wrong: int


@dataclass(frozen=True)
class GateReport:
    """A threshold on answers it was not calibrated on.

    Attributes:
        threshold: nats.
        stopped: share of answers at or below it.
        accuracy_stopped: share of these that are right; None where there are none, which is null in a report.
        accuracy: share of all that are right.
        against_all_rounds: tokens saved, and accuracy, relative to running every round; None where they were not run.
    """

    threshold: float
    stopped: float
    accuracy_stopped: float | None
    accuracy: float
    against_all_rounds: Savings | None = None


def calibrate(entropies: Floats, right: NDArray[np.bool_]) -> Gate:
    """Thresholds by four estimators (paper #21, Think Just Enough).

    mean: mean entropy of right answers. information: the reading that tells most about correctness, as mutual
    information between being at or below it and being right. bayes: where Gaussians fitted to right and wrong answers,
    weighted by their share, are equal between the means. scale_free: as many deviations above the right answers' mean
    as below the wrong ones', whatever the unit.

    Args:
        entropies: [n] mean entropy of each answer, nats.
        right: [n].

    Raises:
        TurnoutError: INVALID_ARGUMENT: fewer than two answers are right, or fewer than two wrong.
    """
    good, bad = entropies[right], entropies[~right]
    if len(good) < 2 or len(bad) < 2:
        raise invalid("prompts", f"give {len(good)} right and {len(bad)} wrong answers; at least 2 of each are needed")
    spread_good, spread_bad = (max(float(each.std(ddof=1)), 1e-9) for each in (good, bad))
    freedom = (len(good) - 1, len(bad) - 1)
    pooled = math.sqrt((freedom[0] * spread_good**2 + freedom[1] * spread_bad**2) / sum(freedom))
    means = float(good.mean()), float(bad.mean())
    return Gate(
        thresholds={
            "mean": means[0],
            "information": _most_informative(entropies, right),
            "bayes": _equal_risk(means, (spread_good, spread_bad), len(good) / len(entropies)),
            "scale_free": (means[0] * spread_bad + means[1] * spread_good) / (spread_good + spread_bad),
        },
        effect_size=(means[1] - means[0]) / pooled,
        num_right=len(good),
        num_wrong=len(bad),
    )


def _most_informative(entropies: Floats, right: NDArray[np.bool_]) -> float:
    """The reading of the sample with the most mutual information, the least of several."""

    def information(threshold: float) -> float:
        below = entropies <= threshold
        total = 0.0
        for stops in (below, ~below):
            for correct in (right, ~right):
                joint = float((stops & correct).mean())
                if joint > 0.0:
                    total += joint * math.log(joint / (float(stops.mean()) * float(correct.mean())))
        return total

    return float(max(np.unique(entropies), key=information))


def _equal_risk(means: tuple[float, float], spreads: tuple[float, float], prior: float) -> float:
    """Where the weighted densities cross between the means; the nearer mean's side where they do not."""
    low, high = means
    if low >= high:
        return low

    def balance(x: float) -> float:
        densities = [-0.5 * ((x - m) / s) ** 2 - math.log(s) for m, s in zip(means, spreads, strict=True)]
        return densities[0] + math.log(prior) - densities[1] - math.log(1.0 - prior)

    if balance(low) <= 0.0:
        return low
    if balance(high) >= 0.0:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if balance(middle) > 0.0 else (low, middle)
    return (low + high) / 2


def report(gate: Gate, estimator: str, entropies: Floats, right: NDArray[np.bool_]) -> GateReport:
    """How a threshold does on other answers than those it was calibrated on."""
    threshold = gate.thresholds[estimator]
    below = entropies <= threshold
    accuracy = float(right[below].mean()) if below.any() else None
    return GateReport(threshold, float(below.mean()), accuracy, float(right.mean()))


async def measure(
    models: ModelPool,
    source: Source,
    is_right: Callable[[int, tuple[int, ...]], bool],
    top: int,
    advance: Advance = lambda *_: None,
) -> tuple[Floats, NDArray[np.bool_]]:
    """Mean entropy, in nats over the `top` most probable tokens, and correctness of the large model's answers."""

    async def one(index: int) -> tuple[float, bool]:
        seq = source.sequence(index)
        seq.sampling = seq.sampling.model_copy(update={"logprobs": top})
        try:
            tokens = (await models.large.decode(seq)).tokens
        finally:
            models.large.release(seq)
        mean = sum(entropy_nats(token.top[:top]) for token in tokens) / len(tokens)
        return mean, is_right(index, tuple(token.id for token in tokens))

    readings: list[tuple[float, bool]] = []
    for start in range(0, len(source.prompts), AT_ONCE):
        group = range(start, min(start + AT_ONCE, len(source.prompts)))
        readings += await asyncio.gather(*(one(index) for index in group))
        advance("answering", len(readings), len(source.prompts))
    return np.array([mean for mean, _ in readings]), np.array([right for _, right in readings])


@dataclass(frozen=True)
class Calibrated:
    """An artifact for the monitor `enough`, and how its thresholds do on the answers held back."""

    artifact: Artifact
    gate: Gate
    reports: dict[str, GateReport]

    @property
    def report(self) -> dict[str, Any]:
        """Everything measured, as plain values."""
        heldout = {name: asdict(each) for name, each in self.reports.items()}
        return {**asdict(self.gate), "heldout": heldout, "harmful": harmful(self.reports), "warning": self.warning}

    @property
    def warning(self) -> str:
        """Empty where being reconsidered does this model's answers no harm.

        Tokens are saved against all rounds: where these spoil answers, the most is saved by having one round only.
        """
        for each in self.reports.values():
            rounds = each.against_all_rounds
            if rounds is not None and rounds.accuracy_all.high < each.accuracy:
                return (
                    f"further rounds spoil this model's answers: {each.accuracy:.1%} are right after the first,"
                    f" {rounds.accuracy_all.value:.1%} after all; do not use the monitor enough with it"
                )
        return ""


def harmful(reports: Mapping[str, GateReport]) -> dict[str, float]:
    """Accuracy of the answers that a gate leaves, where fewer are right than after one round; by estimator."""
    gated = {
        name: (each.against_all_rounds.accuracy.value, each.accuracy)
        for name, each in reports.items()
        if each.against_all_rounds is not None
    }
    return {name: left for name, (left, first) in gated.items() if left < first}


def _settings(gate: Gate, reports: Mapping[str, GateReport], num_heldout: int, keep_harmful: bool) -> dict[str, Any]:
    """What the artifact says of the gate.

    Raises:
        TurnoutError: INVALID_ARGUMENT: every threshold does harm, and they are not to be kept.
    """
    harm, first = harmful(reports), next(iter(reports.values())).accuracy
    if len(harm) == len(reports) and not keep_harmful:
        with_it = ", ".join(f"{accuracy:.1%} with {name}" for name, accuracy in harm.items())
        raise invalid(
            "monitor",
            f"enough makes this model's answers worse: of {num_heldout} held-out answers {first:.1%} are right after"
            f" one round, {with_it}; to write the artifact all the same, for study, give --keep-harmful",
        )
    kept = {name: each for name, each in gate.thresholds.items() if keep_harmful or name not in harm}
    return {**asdict(gate), "thresholds": kept, "accuracy": first, "harmful": harm}


async def calibrate_enough(
    models: ModelPool,
    source: Source,
    is_right: Callable[[int, tuple[int, ...]], bool],
    top: int,
    rounds: int = 3,
    cue: str = EnoughParams.model_fields["cue"].default,
    keep_harmful: bool = False,
    advance: Advance = lambda *_: None,
) -> Calibrated:
    """Answer, calibrate on every other prompt, report on the others.

    Thresholds with which fewer of the others are right than after a single round are left out of the artifact.

    Args:
        models: the large one answers.
        source: what is asked; its `max_tokens` is for each round.
        is_right: whether some tokens, of a prompt, end in the right answer.
        top: most probable tokens the entropy is taken over.
        rounds: that the report's prompts are answered in, so that savings are counted against all of them.
        cue: words before each further round.
        keep_harmful: keep harmful thresholds too, marked; the monitor uses these only where a request allows it.
        advance: is called with the progress.

    Raises:
        TurnoutError: INVALID_ARGUMENT: see `calibrate`; or every threshold makes answers worse.
    """
    entropies, right = await measure(models, source, is_right, top, advance)
    used = np.arange(len(entropies)) % 2 == 0
    gate = calibrate(entropies[used], right[used])
    heldout = [int(index) for index in np.flatnonzero(~used)]
    answers = await all_rounds(models, source, heldout, is_right, top, rounds, cue, advance)
    reports = {
        name: replace(
            report(gate, name, entropies[~used], right[~used]),
            against_all_rounds=savings(answers, threshold, source.seed),
        )
        for name, threshold in gate.thresholds.items()
    }
    settings = _settings(gate, reports, len(heldout), keep_harmful)
    artifact = Artifact(
        kind="enough",
        trainer="training.entropy_gate",
        settings={
            "top": top,
            "unit": "nats",
            **settings,
            "sampling": source.sampling.model_dump(mode="json"),
            "data": source.digest,
        },
        models={"large": models.large.digest},
        tensors={
            "entropies": torch.from_numpy(entropies[used]).float(),
            "right": torch.from_numpy(right[used]).float(),
        },
    )
    return Calibrated(artifact, gate, reports)
