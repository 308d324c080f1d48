"""Live experiments: what the route log of a served endpoint says of the arms of a split, and of shadows.

A split keeps a session, a tenant or a request in its arm, so the session is what is compared, not the request: two
requests of one session are no two observations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from experiments.stats.hypotheses import ALPHA, corrected, paired_permutation, unpaired_permutation
from experiments.stats.intervals import (
    Floats,
    Interval,
    bca_mean,
    mean_score,
    paired_difference,
    score_difference,
    unpaired_difference,
)
from experiments.stats.power import detectable, detectable_between
from experiments.stats.sequential import ConfidenceSequence
from router.experiment_winner import DECIDED
from turnout.errors import Code, TurnoutError, invalid, not_found

Entry = dict[str, Any]
Metric = Literal["answered", "score", "large_share", "paper", "flops", "ttft_s", "wall_s"]
METRICS: tuple[Metric, ...] = ("answered", "score", "large_share", "paper", "flops", "ttft_s", "wall_s")
OK = "OK"
# Where more of it is better.
GOOD = {"answered", "score"}
# From 0 to 1 by what they are; large tokens that were dropped can bring `large_share` above 1.
SHARES = {"answered", "score"}
LOOKS = 60  # places of the log at which a report shows what the stop rule knew


@dataclass(frozen=True, slots=True)
class LiveRule:
    """Stop rule of a live experiment.

    The mean of each arm is followed by a confidence sequence, and all arms share the alpha, the control among them: so
    the rule may be asked as often as one likes and holds for all arms of a split together, as long as the units that
    were counted are over: a session that continues changes what was counted.

    Attributes:
        metric: what is watched.
        most: no value counts as more than this.
        margin: a difference that matters, in the unit of the metric.
        alpha: chance of a wrong stop, over all looks and all arms of a split.
    """

    metric: Metric = "paper"
    most: float = 2.0
    margin: float = 0.0
    alpha: float = ALPHA


@dataclass(frozen=True, slots=True)
class Look:
    """Knowledge of a stop rule after a number of units of both arms."""

    units: int
    interval: Interval


@dataclass(frozen=True, slots=True)
class LiveLine:
    """One arm. What says how it differs from the control is empty for the control.

    Attributes:
        units: sessions, tenants or requests that were divided.
        requests: of them.
        means: by metric, with 95% intervals over units: BCa, of right and wrong Wilson's.
        differences: by metric, arm less control, with BCa intervals, of right and wrong Newcombe's.
        p: by metric, of no difference, adjusted for all of them.
        apart: by metric, the difference that this number of units can detect; without those that do not vary.
        verdict: what the stop rule says: stop: better, stop: worse, or go on.
        interval: of the rule's metric, arm less control, valid at any time; None for the control.
        looks: how it came about as units came.
    """

    pool: str
    arm: str
    units: int
    requests: int
    means: dict[str, Interval]
    differences: dict[str, Interval] = field(default_factory=dict)
    p: dict[str, float] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    interval: Interval | None = None
    looks: list[Look] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShadowLine:
    """Requests and the shadow of each: paired, and never billed.

    Attributes:
        pairs: requests that were answered twice.
        same_text: share whose text is the answer's.
        differences: by metric, shadow less request. FLOPs lack the shadow's prompt, which it found cached.
        p: by metric, of no difference, adjusted for all of them.
        apart: by metric, the difference that this number of pairs can detect; without those that do not vary.
    """

    pool: str
    policy: str
    pairs: int
    same_text: Interval
    differences: dict[str, Interval]
    p: dict[str, float]
    apart: dict[str, float] = field(default_factory=dict)


def of_pool(entries: Iterable[Entry], pool: str) -> list[Entry]:
    """The entries of one pool, or with "" of all.

    Raises:
        TurnoutError: NOT_FOUND: none is of that pool.
    """
    given = list(entries)
    if not pool:
        return given
    found = [entry for entry in given if entry.get("pool", "") == pool]
    if not found:
        raise not_found("pool", pool, sorted({str(entry.get("pool", "")) for entry in given}))
    return found


def arms(entries: Iterable[Entry], control: str, rule: LiveRule) -> list[LiveLine]:
    """The arms of a split, the control first.

    Args:
        entries: of a route log, in the order they were written.
        control: name of the arm that others are compared with.
        rule: when to stop.

    Raises:
        TurnoutError: NOT_FOUND: a pool has no such arm; INVALID_ARGUMENT: nothing of a split in the log.
    """
    pools = divided(entries)
    if not pools:
        raise invalid("log", "holds no request that a split decided about")
    for pool, by_arm in pools.items():
        if control in by_arm:
            continue
        missing = not_found("control", control, list(by_arm))
        if len(pools) == 1:
            raise missing
        raise TurnoutError(
            Code.NOT_FOUND, f"{missing.message} in pool {pool!r}; look at one pool with --pool", "control"
        )
    return [line for pool, by_arm in pools.items() for line in _pool_arms(pool, by_arm, control, rule)]


def divided(entries: Iterable[Entry]) -> dict[str, dict[str, list[Entry]]]:
    """Requests that a split decided about, by pool and arm; pools sorted."""
    found: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        decision = entry["decision"] or {}
        arm = decision.get("arm") if entry["kind"] == "request" else None
        # What came after the split was decided went where it went because of that.
        if arm and DECIDED not in decision.get("features", {}):
            found[str(entry.get("pool", ""))][arm].append(entry)
    return {pool: dict(found[pool]) for pool in sorted(found)}


def _pool_arms(pool: str, by_arm: dict[str, list[Entry]], control: str, rule: LiveRule) -> list[LiveLine]:
    values = {arm: {metric: _by_unit(members, metric) for metric in METRICS} for arm, members in by_arm.items()}
    others = sorted(set(by_arm) - {control})
    compared: list[tuple[str, Metric]] = [
        (arm, metric)
        for arm in others
        for metric in METRICS
        if len(values[arm][metric]) and len(values[control][metric])
    ]
    raw = [unpaired_permutation(values[arm][metric], values[control][metric]) for arm, metric in compared]
    adjusted = dict(zip(compared, corrected(raw), strict=True))
    lines = []
    for arm in [control, *others]:
        line = LiveLine(
            pool,
            arm,
            units=len(values[arm]["answered"]),
            requests=len(by_arm[arm]),
            means={metric: _mean(metric, each) for metric, each in values[arm].items() if len(each)},
            verdict="control",
        )
        lines.append(line if arm == control else _compared(line, values, control, adjusted, rule))
    return lines


def _compared(
    line: LiveLine,
    values: dict[str, dict[Metric, Floats]],
    against: str,
    adjusted: dict[tuple[str, Metric], float],
    rule: LiveRule,
) -> LiveLine:
    """The same arm, with how it differs from the control, of the values of all arms."""
    mine, control = values[line.arm], values[against]
    looks = followed(mine[rule.metric], control[rule.metric], rule, len(values))
    metrics = [metric for arm, metric in adjusted if arm == line.arm]
    apart = {metric: detectable_between(mine[metric], control[metric], ALPHA / len(adjusted)) for metric in metrics}
    return replace(
        line,
        differences={metric: _difference(metric, mine[metric], control[metric]) for metric in metrics},
        p={metric: adjusted[line.arm, metric] for metric in metrics},
        apart={metric: each for metric, each in apart.items() if each is not None},
        verdict=_verdict(looks[-1].interval, rule),
        interval=looks[-1].interval,
        looks=looks,
    )


def _mean(metric: str, values: Floats) -> Interval:
    return mean_score(values) if metric in SHARES else bca_mean(values)


def _difference(metric: str, mine: Floats, control: Floats) -> Interval:
    return score_difference(mine, control) if metric in SHARES else unpaired_difference(mine, control)


def _paired(metric: str, differences: Floats) -> Interval:
    return paired_difference(differences, np.zeros_like(differences)) if metric == "score" else bca_mean(differences)


def _by_unit(members: list[Entry], metric: Metric) -> Floats:
    """Mean of a metric over each unit's requests, units in the order of their first request."""
    units: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for entry in members:
        value = _value(entry, metric)
        if value is not None:
            units[_unit(entry)].append(value)
    return np.array([float(np.mean(each)) for each in units.values()])


def _unit(entry: Entry) -> tuple[str, ...]:
    """What the split divided: all requests of it have the same place between 0 and 1."""
    place = entry["decision"].get("features", {}).get("place")
    if place is not None:
        return (repr(place),)
    return (str(entry.get("tenant", "")), str(entry.get("session") or entry["request_id"]))


def _value(entry: Entry, metric: Metric) -> float | None:
    outcome = entry["outcome"]
    if metric == "answered":
        return float(outcome.get("status") == OK)
    if outcome.get("status") != OK:
        return None
    if metric == "score":  # of what `experiments.live_scores` scored
        return entry.get("score")
    if metric == "flops":
        alone = outcome["flops_large_only"]
        return outcome["flops"] / alone if alone else None
    return float(outcome[metric])


def followed(mine: Floats, control: Floats, rule: LiveRule, num_arms: int) -> list[Look]:
    """Difference of two means by a confidence sequence each, as both arms grew.

    Values beyond the bounds count as the bounds.

    Args:
        mine: [n] a value of each unit of an arm, in the order they came.
        control: [m] of the control.
        rule: when to stop.
        num_arms: of the split; as many sequences share the rule's alpha, since the control's is the same for all.
    """
    most = min(rule.most, 1.0) if rule.metric in SHARES else rule.most
    sequences = [ConfidenceSequence(0.0, most, rule.alpha / num_arms) for _ in range(2)]
    values = [np.clip(each, 0.0, most).tolist() for each in (mine, control)]
    found: list[Look] = []
    for start, end in pairwise(range(LOOKS + 1)):
        for sequence, each in zip(sequences, values, strict=True):
            sequence.add(each[len(each) * start // LOOKS : len(each) * end // LOOKS])
        one, other = (sequence.interval for sequence in sequences)
        interval = Interval(one.value - other.value, one.low - other.high, one.high - other.low)
        units = sum(sequence.count for sequence in sequences)
        if found and found[-1].units in (0, units):
            found.pop()
        found.append(Look(units, interval))
    return found


def _verdict(interval: Interval, rule: LiveRule) -> str:
    gain, loss = ("better", "worse") if rule.metric in GOOD else ("worse", "better")
    if interval.low > rule.margin:
        return f"stop: {gain}"
    if interval.high < -rule.margin:
        return f"stop: {loss}"
    return "go on"


def shadows(entries: Iterable[Entry]) -> list[ShadowLine]:
    """Shadows and the requests they repeat, by pool and policy; those without a finished pair are left out."""
    requests: dict[tuple[str, str], Entry] = {}
    pairs: dict[tuple[str, str], list[tuple[Entry, Entry]]] = defaultdict(list)
    for entry in entries:
        key = (str(entry.get("pool", "")), str(entry["request_id"]))
        if entry["outcome"].get("status") != OK:
            continue
        if entry["kind"] == "request":
            requests[key] = entry
        elif key in requests:
            policy = str((entry["decision"] or {}).get("policy", ""))
            pairs[key[0], policy].append((entry, requests[key]))
    return [_shadow(pool, policy, found) for (pool, policy), found in sorted(pairs.items())]


def _shadow(pool: str, policy: str, pairs: list[tuple[Entry, Entry]]) -> ShadowLine:
    watched: list[Metric] = [metric for metric in METRICS if metric != "answered"]
    differences: dict[str, Floats] = {}
    for metric in watched:
        both = [(_value(shadow, metric), _value(request, metric)) for shadow, request in pairs]
        differences[metric] = np.array([a - b for a, b in both if a is not None and b is not None])
    known = {metric: each for metric, each in differences.items() if len(each)}
    p = corrected([paired_permutation(each) for each in known.values()])
    return ShadowLine(
        pool,
        policy,
        pairs=len(pairs),
        same_text=mean_score(np.array([float(bool(shadow.get("same_text"))) for shadow, _ in pairs])),
        differences={metric: _paired(metric, each) for metric, each in known.items()},
        p=dict(zip(known, p, strict=True)),
        apart={
            metric: detectable(len(each), float(np.std(each)), ALPHA / len(known))
            for metric, each in known.items()
            if np.ptp(each) > 0.0
        },
    )
