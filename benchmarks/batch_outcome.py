"""Result of a job whose parts were killed, its faults, and the report."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.harness import Report

FIGURES = ("rows", "lost", "duplicates", "redone", "seconds", "rate", "growth")  # in the JSON file
LEAST_SHARE = 0.9  # of what the engine alone does
MOST_GROWTH = 1.15  # of memory, late over early


@dataclass(frozen=True)
class Kill:
    """A part that was ended by SIGKILL: which, after how many lines, and when, in seconds since the start."""

    part: str
    after: int
    at: float = 0.0


@dataclass(frozen=True)
class Sample:
    """A look at a job.

    Attributes:
        at: seconds since the start.
        lines: that have a result.
        bytes: memory of the driver and its cluster; None: not looked at.
    """

    at: float
    lines: int
    bytes: int | None = None


@dataclass
class Outcome:
    """Result of a job.

    Attributes:
        rows: lines of the job.
        block_rows: lines of a block.
        wanted: kills that were to be.
        status: of the driver that finished it.
        ids: of the lines in the output.
    """

    rows: int
    block_rows: int
    wanted: int = 0
    kills: list[Kill] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    status: int = -1
    seconds: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    ids: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Lines without an answer."""
        return sum(1 for number in range(self.rows) if f"id-{number}" not in self.ids)

    @property
    def duplicates(self) -> int:
        """Answers beyond the first of a line."""
        return sum(count - 1 for count in self.ids.values())

    @property
    def redone(self) -> int:
        """Lines that were asked again because a process had ended before it had their answer."""
        return int(self.summary.get("redone_rows", 0))

    @property
    def pauses(self) -> list[float]:
        """Seconds from each kill to the next line that was answered."""
        found = []
        for kill in self.kills:
            after = next((each.at for each in self.samples if each.at > kill.at and each.lines > kill.after), kill.at)
            found.append(after - kill.at)
        return found

    @property
    def rate(self) -> float:
        """Lines a second from the first one to the last, the pauses after kills left out."""
        answered = [each for each in self.samples if each.lines]
        if not answered:
            return 0.0
        first, end = answered[0], next(each for each in answered if each.lines == answered[-1].lines)
        paused = [(kill.at, kill.at + pause) for kill, pause in zip(self.kills, self.pauses, strict=True)]
        working = 0.0
        for one, two in pairwise([each for each in answered if each.at <= end.at]):
            hidden = sum(max(min(two.at, stop) - max(one.at, start), 0.0) for start, stop in paused)
            working += max(two.at - one.at - hidden, 0.0)
        return (end.lines - first.lines) / working if working else 0.0

    @property
    def memory(self) -> list[Sample]:
        """Looks at the memory during which the job made progress."""
        return [now for before, now in pairwise(self.samples) if now.bytes is not None and now.lines > before.lines]

    @property
    def undisturbed(self) -> list[Sample]:
        """Looks at the memory in the longest time without a kill: a process that starts anew is small."""
        ends = [0.0, *(kill.at for kill in self.kills), math.inf]
        stretches = [[look for look in self.memory if start < look.at <= end] for start, end in pairwise(ends)]
        return max(stretches, key=len)

    @property
    def growth(self) -> float:
        """Memory late in the longest time without a kill over early: medians of its last and second quarter."""
        sizes = [look.bytes or 0 for look in self.undisturbed]
        quarter = len(sizes) // 4
        if not quarter:
            return 1.0
        middle = [sorted(part)[len(part) // 2] for part in (sizes[quarter : 2 * quarter], sizes[-quarter:])]
        return middle[1] / middle[0]

    def faults(self, alone: float | None = None) -> list[str]:
        """What does not hold.

        Args:
            alone: lines a second of the engine alone, in this very run; None: neither speed nor memory is judged, as
                in a job that is too short for it.
        """
        found, most = [], self.block_rows * len(self.kills)
        if self.status != 0:
            found.append(f"the last driver ended with status {self.status}")
        if self.lost or self.duplicates:
            found.append(f"{self.lost} lines are lost, {self.duplicates} are there twice")
        if len(self.kills) < self.wanted:
            found.append(f"{self.wanted - len(self.kills)} of {self.wanted} kills did not happen")
        if self.redone > most:
            found.append(f"{self.redone} lines were asked again, more than {most}: a block for each kill")
        if alone is not None:
            if self.rate < LEAST_SHARE * alone:
                found.append(
                    f"{self.rate:.1f} lines a second are less than {LEAST_SHARE:.0%} of the engine's {alone:.1f}"
                )
            if self.growth > MOST_GROWTH:
                found.append(f"memory has grown to {self.growth:.2f} times what it was")
        return found


@dataclass(frozen=True)
class Alone:
    """Lines a second of the engine without a job.

    Attributes:
        alike: one process, with the job's settings.
        usual: one process with its default settings, which bound the length of a step.
        copies: as many processes as the job has copies, which share what it has at once, together.
    """

    alike: float
    usual: float
    copies: float


def page(outcome: Outcome, alone: Alone, setting: str, machine: dict[str, str] | None = None) -> Report:
    """The report.

    Args:
        outcome: of the job.
        alone: what it is measured by.
        setting: how it was run, a sentence.
        machine: see `Report`.
    """
    killed = ", ".join(
        f"{kill.part} after {kill.after} (pause {pause:.0f} s)"
        for kill, pause in zip(outcome.kills, outcome.pauses, strict=True)
    )
    sizes = [(look.bytes or 0) / 2**20 for look in outcome.memory] or [0.0]
    calm = [look.at for look in outcome.undisturbed] or [0.0]
    rows = [
        ("lines", str(outcome.rows)),
        ("answers in the output", str(len(outcome.ids))),
        ("lost", str(outcome.lost)),
        ("there twice", str(outcome.duplicates)),
        ("killed", killed or "nothing"),
        ("lines asked again", f"{outcome.redone} (a block has {outcome.block_rows})"),
        ("whole time", f"{outcome.seconds:.0f} s, {outcome.rows / max(outcome.seconds, 1e-9):.1f} lines a second"),
        ("lines a second, the pauses after kills left out", f"{outcome.rate:.1f}"),
        *(
            (
                f"the engine alone, before and after, with {what}",
                f"{rate:.1f}; the job is at {_part(outcome.rate, rate)}",
            )
            for what, rate in (
                ("the job's settings", alone.alike),
                ("its default settings", alone.usual),
                ("the job's settings and as many processes as the job has copies", alone.copies),
            )
        ),
        ("memory of the cluster and the driver", f"{min(sizes):.0f} to {max(sizes):.0f} MiB"),
        (f"memory late over early, in the {calm[-1] - calm[0]:.0f} s without a kill", f"{outcome.growth:.2f}"),
        ("prompt tokens cached", f"{outcome.summary.get('cached_share', 0.0):.0%}"),
    ]
    report = Report("A batch whose parts are killed", setting, machine=machine)
    report.facts(dict(rows))
    report.failures += outcome.faults(alone.alike)
    verdict = "It does not hold: " + "; ".join(report.failures) + "." if report.failures else "All of it holds."
    report.text(
        "Wanted: nothing lost or twice, at most a block asked again for each kill,"
        f" {LEAST_SHARE:.0%} of the speed of one engine with the job's settings and as many requests at once, memory at"
        f" most {MOST_GROWTH:g} times that of the beginning. {verdict}"
    )
    report.values |= {
        **{
            name: getattr(outcome, name)
            for name in ("rows", "lost", "duplicates", "redone", "seconds", "rate", "growth")
        },
        "kills": [asdict(kill) for kill in outcome.kills],
        "alone": asdict(alone),
        "failures": report.failures,
    }
    return report


def _part(rate: float, whole: float) -> str:
    return f"{rate / max(whole, 1e-9):.0%}"
