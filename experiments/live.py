"""Live experiments: what the route log of a served endpoint says of the arms of a split, and of shadows.

A split keeps a session, a tenant or a request in its arm, so the session is what is compared, not the request: two
requests of one session are no two observations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from experiments.statistics import Interval
from experiments.stats.hypotheses import ALPHA, corrected, paired_permutation, unpaired_permutation
from experiments.stats.intervals import Floats, bca_mean
from experiments.stats.sequential import ConfidenceSequence
from turnout.errors import invalid, not_found

Entry = dict[str, Any]
Metric = Literal["answered", "large_share", "paper", "flops", "ttft_s", "wall_s"]
METRICS: tuple[Metric, ...] = ("answered", "large_share", "paper", "flops", "ttft_s", "wall_s")
OK = "OK"
# Where more of it is better.
GOOD = {"answered"}
# From 0 to 1 by what they are.
SHARES = {"answered", "large_share"}


@dataclass(frozen=True, slots=True)
class LiveRule:
    """When to stop a live experiment.

    The difference of the means of two arms is followed by confidence sequences, half the alpha each, so that the rule
    may be asked as often as one likes, as long as the units that were counted are over: a session that goes on changes
    what was counted. It holds for each arm by itself.

    Attributes:
        metric: what is watched.
        most: no value counts as more than this.
        margin: a difference that matters, in the unit of the metric.
        alpha: chance of a wrong stop, over all looks.
    """

    metric: Metric = "paper"
    most: float = 2.0
    margin: float = 0.0
    alpha: float = ALPHA


@dataclass(frozen=True, slots=True)
class LiveLine:
    """One arm.

    Attributes:
        units: sessions, tenants or requests that were divided.
        requests: of them.
        means: by metric, with BCa intervals over units.
        p: by metric, of no difference from the control, adjusted for all of them; empty for the control.
        verdict: what the stop rule says: stop, better; stop, worse; go on.
        interval: of the rule's metric, arm less control, valid at any time; None for the control.
    """

    pool: str
    arm: str
    units: int
    requests: int
    means: dict[str, Interval]
    p: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class ShadowLine:
    """Requests beside what a shadow of each did: paired, and never billed.

    Attributes:
        pairs: requests that were answered twice.
        same_text: share whose text is the answer's.
        differences: by metric, shadow less request. FLOPs lack the shadow's prompt, which it found cached.
        p: by metric, of no difference, adjusted for all of them.
    """

    pool: str
    policy: str
    pairs: int
    same_text: Interval
    differences: dict[str, Interval]
    p: dict[str, float]


def arms(entries: Iterable[Entry], control: str, rule: LiveRule) -> list[LiveLine]:
    """The arms of a split, the control first.

    Args:
        entries: of a route log, in the order they were written.
        control: name of the arm that others are compared with.
        rule: when to stop.

    Raises:
        TurnoutError: NOT_FOUND: no such arm; INVALID_ARGUMENT: nothing of a split in the log.
    """
    requests = [entry for entry in entries if entry["kind"] == "request" and (entry["decision"] or {}).get("arm")]
    if not requests:
        raise invalid("log", "holds no request that a split decided about")
    found: list[LiveLine] = []
    for pool in sorted({str(entry.get("pool", "")) for entry in requests}):
        by_arm: dict[str, list[Entry]] = defaultdict(list)
        for entry in requests:
            if str(entry.get("pool", "")) == pool:
                by_arm[entry["decision"]["arm"]].append(entry)
        if control not in by_arm:
            raise not_found("control", control, list(by_arm))
        found += _pool_arms(pool, by_arm, control, rule)
    return found


def _pool_arms(pool: str, by_arm: dict[str, list[Entry]], control: str, rule: LiveRule) -> list[LiveLine]:
    values = {arm: {metric: _by_unit(members, metric) for metric in METRICS} for arm, members in by_arm.items()}
    others = sorted(set(by_arm) - {control})
    raw = {
        (arm, metric): unpaired_permutation(values[arm][metric], values[control][metric])
        for arm in others
        for metric in METRICS
        if len(values[arm][metric]) and len(values[control][metric])
    }
    adjusted = dict(zip(raw, corrected(list(raw.values())), strict=True))
    lines = []
    for arm in [control, *others]:
        interval = None if arm == control else _sequences(values[arm][rule.metric], values[control][rule.metric], rule)
        lines.append(
            LiveLine(
                pool,
                arm,
                units=len(values[arm]["answered"]),
                requests=len(by_arm[arm]),
                means={metric: bca_mean(each) for metric, each in values[arm].items() if len(each)},
                p={metric: p for (name, metric), p in adjusted.items() if name == arm},
                verdict="control" if interval is None else _verdict(interval, rule),
                interval=interval,
            )
        )
    return lines


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
    if metric == "flops":
        alone = outcome["flops_large_only"]
        return outcome["flops"] / alone if alone else None
    return float(outcome[metric])


def _sequences(mine: Floats, control: Floats, rule: LiveRule) -> Interval:
    """Difference of two means by a confidence sequence each; values beyond the bounds count as the bounds."""
    ends = []
    most = min(rule.most, 1.0) if rule.metric in SHARES else rule.most
    for values in (mine, control):
        sequence = ConfidenceSequence(0.0, most, rule.alpha / 2)
        sequence.add(np.clip(values, 0.0, most).tolist())
        ends.append(sequence.interval)
    one, other = ends
    return Interval(one.value - other.value, one.low - other.high, one.high - other.low)


def _verdict(interval: Interval, rule: LiveRule) -> str:
    gain, loss = ("better", "worse") if rule.metric in GOOD else ("worse", "better")
    if interval.low > rule.margin:
        return f"stop: {gain}"
    if interval.high < -rule.margin:
        return f"stop: {loss}"
    return "go on"


def shadows(entries: Iterable[Entry]) -> list[ShadowLine]:
    """Shadows beside the requests they repeat, by pool and policy; those without a finished pair are left out."""
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
        same_text=bca_mean(np.array([float(bool(shadow.get("same_text"))) for shadow, _ in pairs])),
        differences={metric: bca_mean(each) for metric, each in known.items()},
        p=dict(zip(known, p, strict=True)),
    )
