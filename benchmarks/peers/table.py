"""The report of a comparison: figures, ratios and goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from typing import Any

from benchmarks.harness import Goal, Report, shown
from benchmarks.peers.plan import SIDES, TARGETS, THROUGHPUT
from benchmarks.peers.turns import Outcome

SHARE = "share"  # the unit of numbers that are better when smaller
IDLE_CORES = 0.1  # used by all but the engine at work; more is reported


@dataclass(slots=True)
class Comparison:
    """Results of one run.

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
            goals = {each.against: each.goal for each in TARGETS if each.applies_to(subject, outcome.workload)}
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
    asked = str(goal) if goal else ""
    if lacking:
        reason = "not installed" if lacking[0] in comparison.missing else "no numbers"
        measured, met = f"{lacking[0]}: {reason}", "not measured" if goal else ""
    else:
        interval = outcome.ratio(against, ours) if against else outcome.spread(ours)
        measured = shown(interval, 2 if against else 3)
        met = goal.met(interval) if goal else ""
    return Verdict(subject, outcome.workload, ours, against or "", measured, asked, met)


def page(comparison: Comparison) -> Report:
    """The report of what is measured so far."""
    setting = comparison.setting
    report = Report(
        "Turnout compared with other engines",
        f"`make bench`. Greedy, {setting['dtype']}, {setting['threads']} threads on every side, the same checkpoints"
        " and the same prompts. Each engine runs in a process of its own; they take turns, in an order that rotates,"
        f" and wait idle. One round warms up; then the median of {setting['rounds']} rounds [smallest, largest]; a"
        " ratio is taken round by round. A turn is at least one second of work.",
        machine=comparison.machine,
    )
    versions = {
        name: ", ".join(f"{key} {value}" for key, value in each.items()) for name, each in comparison.versions.items()
    }
    lacking = {name: f"not measured, not installed: {missing}" for name, missing in comparison.missing.items()}
    engines = list({**versions, **lacking}.items())
    report.table(None, engines, {"engine": lambda row: row[0], "versions and settings": lambda row: row[1]})
    for subject, outcomes in comparison.subjects.items():
        report.section(subject)
        _add_figures(report, outcomes)
    report.section("Against each, and the goals")
    columns = {
        "model": "subject", "work": "workload", "ours": "ours", "over": "against", "ratio or number": "measured",
        "goal": "goal", "met": "met",
    }  # fmt: skip
    report.table(
        None,
        verdicts(comparison),
        {name: partial(lambda of, row: getattr(row, of), of) for name, of in columns.items()},
    )
    report.text(_idle(comparison))
    report.values |= {**comparison.as_dict(), "date": f"{date.today()}"}
    return report


def _add_figures(report: Report, outcomes: list[Outcome]) -> None:
    present = [name for name in SIDES if any(name in o.values or name in o.failures for o in outcomes)]
    columns = {"work": lambda row: row.workload, "unit": lambda row: row.unit}
    report.table(None, outcomes, {**columns, **{name: partial(_cell, name) for name in present}})
    lowest = {name: min(o.agreement.get(name, 1.0) for o in outcomes) for name in present}
    apart = [f"{name} {share:.0%}" for name, share in lowest.items() if share < 1]
    if apart:
        report.text(f"Answers that begin with the same token as ours, at least: {', '.join(apart)}; others: all.")
    for outcome in outcomes:
        for name, reason in outcome.failures.items():
            report.text(f"{name} failed at {outcome.workload}: {reason}")


def _cell(name: str, outcome: Outcome) -> str:
    if name in outcome.failures:
        return "failed"
    if name not in outcome.values:
        return ""
    return shown(outcome.spread(name), 3 if outcome.unit == SHARE else 0)


def _idle(comparison: Comparison) -> str:
    """Whether all but the engine at work rested, without which a ratio means little."""
    outcomes = [outcome for outcomes in comparison.subjects.values() for outcome in outcomes]
    waiting = max((outcome.waiting_cpu for outcome in outcomes), default=0.0)
    foreign = max((outcome.foreign_cpu for outcome in outcomes), default=0.0)
    text = (
        f"Of one core, over a whole turn: engines that waited used at most {waiting:.1%} together, and other programs"
        f" at most {foreign:.1%}."
    )
    busy = [o.workload for o in outcomes if max(o.waiting_cpu, o.foreign_cpu) > IDLE_CORES]
    if busy:
        text += f" That is more than {IDLE_CORES:.0%} and disturbs a measurement: {', '.join(dict.fromkeys(busy))}."
    return text
