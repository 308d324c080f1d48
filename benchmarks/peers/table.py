"""The report of a comparison: numbers, ratios and goals as Markdown, and everything as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.plan import GOALS, SIDES, THROUGHPUT, Goal
from benchmarks.peers.turns import Outcome
from experiments.machine import one_line
from experiments.stats.intervals import Interval

SHARE = "share"  # the unit of numbers that are better when smaller
IDLE_CORES = 0.1  # used by anyone but the engine at work; more is reported


@dataclass(slots=True)
class Comparison:
    """Everything one run found out.

    Attributes:
        machine: see `experiments.machine.describe`.
        setting: dtype, threads and rounds.
        versions: by engine.
        missing: by engine that could not run, what to install.
        subjects: outcomes by model.
    """

    machine: dict[str, str]
    setting: dict[str, Any]
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    subjects: dict[str, list[Outcome]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file: all rounds of all engines, and ours against each of them."""
        return {**asdict(self), "verdicts": [asdict(verdict) for verdict in verdicts(self)]}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our engine against another, or where `against` is empty against a bound of its own.

    Attributes:
        ours: which of our settings.
        measured: the ratio, or the number itself; or why there is none.
        goal: what is asked, empty when nothing is.
        met: "yes", "no" or "not measured"; empty without a goal.
    """

    subject: str
    workload: str
    ours: str
    against: str
    measured: str
    goal: str
    met: str


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Every ratio that was measured, and every goal whether measured or not."""
    found = []
    for subject, outcomes in comparison.subjects.items():
        for outcome in outcomes:
            goals = {goal.against: goal for goal in GOALS if goal.applies_to(subject, outcome.workload)}
            measured = [name for name in outcome.values if name != outcome.ours] if outcome.unit != SHARE else []
            for ours in [outcome.ours, *(name for name in outcome.values if name == THROUGHPUT)]:
                found += [
                    _verdict(comparison, subject, outcome, ours, against, goals.get(against))
                    for against in dict.fromkeys([*measured, *goals])
                    if against != THROUGHPUT
                ]
    return found


def _verdict(
    comparison: Comparison, subject: str, outcome: Outcome, ours: str, against: str | None, goal: Goal | None
) -> Verdict:
    lacking = [name for name in (ours, against) if name is not None and name not in outcome.values]
    asked = goal.text if goal else ""
    if lacking:
        reason = "not installed" if lacking[0] in comparison.missing else "no numbers"
        measured, met = f"{lacking[0]}: {reason}", "not measured" if goal else ""
    else:
        interval = outcome.ratio(against, ours) if against else outcome.spread(ours)
        measured = _interval(interval, 2 if against else 3)
        met = "" if goal is None else "yes" if goal.met(interval.value) else "no"
    return Verdict(subject, outcome.workload, ours, against or "", measured, asked, met)


def to_markdown(comparison: Comparison) -> str:
    """The page."""
    setting = comparison.setting
    lines = [
        "# Turnout beside other engines",
        "",
        f"`make bench`: {one_line(comparison.machine)}. Greedy, {setting['dtype']}, {setting['threads']} threads on"
        f" every side, the same checkpoints and the same prompts. Each engine runs in a process of its own; they take"
        f" turns, in an order that rotates, and wait idle. One round warms up; then the median of {setting['rounds']}"
        " rounds [smallest, largest]; a ratio is taken round by round. A turn is at least one second of work.",
        "",
        *_sides(comparison),
    ]
    for subject, outcomes in comparison.subjects.items():
        lines += ["", f"## {subject}", "", *_numbers(outcomes)]
    lines += ["", "## Against each, and the goals", "", *_verdicts(comparison)]
    return "\n".join([*lines, "", *_idle(comparison), ""])


def _sides(comparison: Comparison) -> list[str]:
    lines = ["| engine | versions and settings |", "| --- | --- |"]
    for name, versions in comparison.versions.items():
        lines.append(f"| {name} | {', '.join(f'{key} {value}' for key, value in versions.items())} |")
    for name, missing in comparison.missing.items():
        lines.append(f"| {name} | not measured, not installed: {missing} |")
    return lines


def _numbers(outcomes: list[Outcome]) -> list[str]:
    present = [name for name in SIDES if any(name in o.values or name in o.failures for o in outcomes)]
    lines = [f"| work | unit | {' | '.join(present)} |", f"| --- | --- |{' --- |' * len(present)}"]
    for outcome in outcomes:
        cells = [_cell(outcome, name) for name in present]
        lines.append(f"| {outcome.workload} | {outcome.unit} | {' | '.join(cells)} |")
    lowest = {name: min(o.agreement.get(name, 1.0) for o in outcomes) for name in present}
    apart = [f"{name} {share:.0%}" for name, share in lowest.items() if share < 1]
    if apart:
        lines += ["", f"Answers that begin with the same token as ours, at least: {', '.join(apart)}; others: all."]
    failed = [(o.workload, name, reason) for o in outcomes for name, reason in o.failures.items()]
    lines += [f"\n{name} failed at {work}: {reason}" for work, name, reason in failed]
    return lines


def _cell(outcome: Outcome, name: str) -> str:
    if name in outcome.failures:
        return "failed"
    if name not in outcome.values:
        return ""
    return _interval(outcome.spread(name), 3 if outcome.unit == SHARE else 0)


def _interval(interval: Interval, digits: int) -> str:
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def _verdicts(comparison: Comparison) -> list[str]:
    lines = ["| model | work | ours | over | ratio or number | goal | met |", f"|{' --- |' * 7}"]
    rows = (
        (found.subject, found.workload, found.ours, found.against, found.measured, found.goal, found.met)
        for found in verdicts(comparison)
    )
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _idle(comparison: Comparison) -> list[str]:
    """Whether everybody but the engine at work rested, without which a ratio means little."""
    outcomes = [outcome for outcomes in comparison.subjects.values() for outcome in outcomes]
    waiting = max((outcome.waiting_cpu for outcome in outcomes), default=0.0)
    foreign = max((outcome.foreign_cpu for outcome in outcomes), default=0.0)
    lines = [
        f"Of one core, over a whole turn: engines that waited used at most {waiting:.1%} together, and everything"
        f" that is no engine at most {foreign:.1%}."
    ]
    if waiting > IDLE_CORES or foreign > IDLE_CORES:
        busy = [o.workload for o in outcomes if max(o.waiting_cpu, o.foreign_cpu) > IDLE_CORES]
        lines.append(
            f"That is more than {IDLE_CORES:.0%} and disturbs a measurement: {', '.join(dict.fromkeys(busy))}."
        )
    return lines
