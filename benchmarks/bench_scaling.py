"""A pool that scales itself under steps of load, and the choice of a replica by cached prompts compared with Ray's own.

The server is a process of its own, the demo pair on this machine: replicas share its cores, so more of them are not
faster here. What is measured is whether and when they come and go, and who gets which request.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Cell, Goal, Report, command_line, run, shown
from benchmarks.scaling import load_steps, shared_prefixes
from benchmarks.scaling.load_steps import GOAL_S, Scaled
from benchmarks.scaling.shared_prefixes import Arm
from experiments.stats.intervals import spread

DEMO_ONLY = "loads and delays are set for the speed of the demo pair"
NAMES = {"prefix": "cached prompts and load", "load": "Ray's default: the less busy of two"}


def steps_page(report: Report, found: Scaled) -> None:
    """Add the first part."""
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    report.section("Replicas follow the load")
    report.text(
        f"Requests at once, each followed by another one. Settings: {settings}. Goals: replicas follow within"
        f" {GOAL_S:g} s, no request fails."
    )
    report.values["steps"] = asdict(found)
    goal = Goal(GOAL_S, at_most=True)
    columns = {
        "load": lambda each: each.name,
        "requests at once": lambda each: each.at_once,
        "replicas wanted": lambda each: each.wanted,
        "there after, s": lambda each: "never" if each.followed_s is None else shown(each.followed_s, 1),
        "within the goal": lambda each: "no" if each.followed_s is None else goal.met(each.followed_s),
        "answered": lambda each: each.answered,
        "failed": lambda each: f"{len(each.failed)} ({', '.join(sorted(set(each.failed))) or 'none'})",
        "first token, median, ms": lambda each: shown(each.ttft_s, 0, 1000) if each.answered else None,
    }
    report.table(None, found.steps, columns)
    report.text(f"Replicas over time: {', '.join(f'{at:g} s: {count}' for at, count in found.replicas)}.")
    cold = f"failed: {found.cold_error}" if found.cold_error else f"{found.cold_s:.1f} s"
    report.text(
        f"First token of a request that finds no replica (a cold start): {cold}; with one replica, idle:"
        f" {1000 * found.warm_s:.0f} ms."
    )


def choice_page(report: Report, rates: dict[str, float], replicas: int, arms: list[Arm]) -> None:
    """Add the second part."""
    report.section("The choice of a replica")
    report.text(
        f"{replicas} replicas, {shared_prefixes.PREFIXES} beginnings, one of them in {shared_prefixes.HOT:.0%} of the"
        " requests; arrivals are Poisson. Median of the rounds [smallest, largest], a new server for each."
    )
    report.values["choice"] = {"rates": rates, "arms": [asdict(arm) for arm in arms]}
    columns: dict[str, Callable[[list[Arm]], Cell]] = {
        "choice": lambda each: NAMES[each[0].choice],
        "rounds": len,
        "prompt tokens cached": lambda each: shown(spread([arm.hits for arm in each]), 2),
        "first token p50, ms": lambda each: shown(spread([arm.ttft_s[0] for arm in each]), 0, 1000),
        "p95, ms": lambda each: shown(spread([arm.ttft_s[1] for arm in each]), 0, 1000),
        "busiest replica's share of the work": lambda each: shown(spread([arm.busiest for arm in each]), 2),
        "failed": lambda each: sum(len(arm.failed) for arm in each),
    }
    for kind, rate in rates.items():
        how = shared_prefixes.KINDS[kind]
        report.text(
            f"Beginnings {kind}: {how.words} words; each replica's cache holds {how.cache_tokens} tokens; {rate:.1f}"
            " requests a second."
        )
        rows = [[arm for arm in arms if (arm.kind, arm.choice) == (kind, choice)] for choice in NAMES]
        report.table(None, rows, columns)


def measure(options: argparse.Namespace) -> Report:
    """Both parts, or the one that is asked for, which is not saved."""
    report = Report("Scaling", "`make bench-scaling`; the demo pair, one thread each.")
    if options.only != "choice":
        steps_page(report, load_steps.run(options.hold))
    if options.only != "steps":
        rates, arms = shared_prefixes.run(options.rounds, options.requests, options.replicas)
        choice_page(report, rates, options.replicas, arms)
    options.out = options.out if options.only is None else None
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, Path("docs/results/scaling.md"), demo_only=DEMO_ONLY, requests=60, hold=3.0)
    parser.add_argument("--only", choices=("steps", "choice"), help="one of the two parts; not saved")
    parser.add_argument("--requests", type=int, default=400, help="of a trace")
    parser.add_argument("--replicas", type=int, default=3, help="that the trace is sent to")
    parser.add_argument("--hold", type=float, default=15.0, help="seconds of each step after replicas have followed")
    run(parser, measure)
