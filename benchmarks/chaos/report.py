"""Results of a chaos run, as values and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.chaos.requests import Done
from benchmarks.harness import Report

# A client notices only a pause when one of these is hit: the connection is to another process.
SILENT = frozenset({"draft", "target", "frozen", "replica", "controller"})


@dataclass(frozen=True)
class Strike:
    """One fault and what came after it, in seconds.

    Attributes:
        part: what was hit.
        at: when, from the start of the load.
        back: until a request begun after it was answered at the usual latency; None: not before the next strike.
        settled: until the last request that began after it and was slower than usual, or asked again, had ended; 0.0
            where there was none.
        again: what clients had to ask again for, from this strike to the next.
        slowest: the slowest request in progress at it or begun after it, before the next.
        running: requests in progress at it.
    """

    part: str
    at: float
    back: float | None
    settled: float
    again: dict[str, int]
    slowest: float
    running: int


@dataclass(frozen=True)
class Outcome:
    """A chaos run. `left` names what was still there afterwards though it should not be."""

    seconds: float
    offered_per_s: float
    usual_s: float
    median_s: float
    answered: dict[str, int]
    wrong: list[str]
    lost: list[str]
    strikes: list[Strike]
    left: list[str]
    least_each: int
    parts: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """What is not as it must be."""
        found = [*self.left]
        if self.wrong:
            found.append(f"{len(self.wrong)} wrong answers: {'; '.join(self.wrong[:3])}")
        if self.lost:
            found.append(f"{len(self.lost)} lost requests: {'; '.join(self.lost[:3])}")
        counts = Counter(strike.part for strike in self.strikes)
        found += [f"{part} was hit {counts[part]} times only" for part in self.parts if counts[part] < self.least_each]
        found += [f"{strike.part} at {strike.at:.0f} s: not back" for strike in self.strikes if strike.back is None]
        found += [f"{strike.part} at {strike.at:.0f} s: nothing ran" for strike in self.strikes if not strike.running]
        for strike in self.strikes:
            if strike.part in SILENT and strike.again:
                found.append(f"{strike.part} at {strike.at:.0f} s: clients had to ask again: {strike.again}")
        return found


def strike_of(part: str, at: float, until: float, done: list[Done], usual_s: float, start: float) -> Strike:
    """What a fault did.

    Args:
        part: what was hit.
        at: when, by the requests' clock.
        until: the next fault, or the end.
        done: all requests that have ended.
        usual_s: a latency above it is unusual.
        start: of the load.
    """
    after = sorted((each for each in done if at <= each.begun < until), key=lambda each: each.ended)
    during = [each for each in done if each.begun < until and each.ended > at]
    usual = [each.ended for each in after if _usual(each, usual_s)]
    unusual = [each.ended for each in after if not _usual(each, usual_s)]
    return Strike(
        part,
        at - start,
        min(usual) - at if usual else None,
        max(unusual) - at if unusual else 0.0,
        dict(Counter(code for each in during for when, code in each.refusals if at <= when < until)),
        max((each.seconds for each in during), default=0.0),
        sum(each.begun < at < each.ended for each in done),
    )


def _usual(each: Done, usual_s: float) -> bool:
    return each.error is None and not each.refusals and each.seconds <= usual_s


def page(found: Outcome, machine: dict[str, str] | None = None, pair: str = "demo pair") -> Report:
    """The report of a run."""
    report = Report(
        "Chaos",
        f"`make chaos`. Two raylets on this machine, each with its own address; the {pair} in float32, each model in"
        " an actor on a node of its own, one replica; the head keeps its state in RocksDB."
        f" {found.offered_per_s:g} requests/s, open loop, half over gRPC and half over HTTP, every prompt by every"
        " method, greedy and sampled, with seeds; every answer is compared with the undisturbed one.",
        machine=machine,
    )
    report.facts(
        {
            "duration": f"{found.seconds:.0f} s",
            "answered": ", ".join(f"{count} {name}" for name, count in sorted(found.answered.items())),
            "wrong": len(found.wrong),
            "lost": len(found.lost),
            "latency without faults": f"median {found.median_s:.2f} s; usual is up to {found.usual_s:.2f} s",
            "left behind": "; ".join(found.left) or "nothing",
            "verdict": "; ".join(found.failures) or "passed",
        }
    )
    report.text(
        "kill -9, but for *frozen* (SIGSTOP for the target's process, for good) and for *worker* and *head* (all"
        " processes of the node at once; it is started again then)."
    )
    report.text(
        "*In progress*: requests when it was hit, of all times together. Seconds after it: *back* until a request begun"
        " after it was answered at the usual latency, *settled* until the last unusual one of those begun after it had"
        " ended. *Asked again*: what broke at the clients, which then asked again with the same seed; a proxy takes its"
        " connections along."
    )
    struck = [(part, [each for each in found.strikes if each.part == part]) for part in found.parts]
    report.table(
        None,
        struck,
        {
            "hit": lambda row: row[0],
            "times": lambda row: len(row[1]),
            "in progress": lambda row: sum(each.running for each in row[1]) if row[1] else None,
            "back, median": lambda row: _seconds(np.median, row[1], [e.back for e in row[1] if e.back is not None]),
            "back, most": lambda row: _seconds(max, row[1], [e.back for e in row[1] if e.back is not None]),
            "settled, median": lambda row: _seconds(np.median, row[1], [each.settled for each in row[1]]),
            "settled, most": lambda row: _seconds(max, row[1], [each.settled for each in row[1]]),
            "slowest request": lambda row: _seconds(max, row[1], [each.slowest for each in row[1]]),
            "asked again": lambda row: _again(row[1]) if row[1] else None,
        },
    )
    report.failures += found.failures
    report.values |= {"failures": found.failures, **asdict(found)}
    return report


def _seconds(figure: Callable[[list[float]], Any], strikes: list[Strike], values: list[float]) -> str | None:
    if not strikes:
        return None
    return f"{figure(values):.1f}" if values else "never"


def _again(strikes: list[Strike]) -> str:
    again: Counter[str] = Counter()
    for strike in strikes:
        again.update(strike.again)
    return ", ".join(f"{count} {code}" for code, count in again.items()) or "nothing"
