"""A pool that scales itself under steps of load, and the choice of a replica by cached prompts beside Ray's own.

The server is a process of its own, the demo pair on this machine: replicas share its cores, so more of them are not
faster here. What is measured is whether and when they come and go, and who gets which request.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import publish
from benchmarks.scaling import load_steps, shared_prefixes
from benchmarks.scaling.load_steps import GOAL_S, Scaled
from benchmarks.scaling.shared_prefixes import Arm
from experiments import machine
from experiments.statistics import spread

RESULT = Path("docs/results/scaling.md")
NAMES = {"prefix": "cached prompts and load", "load": "Ray's default: the less busy of two"}


def steps_page(found: Scaled) -> list[str]:
    """The first part."""
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    lines = [
        "## Replicas follow the load",
        "",
        f"Requests at once, each followed by another one. Settings: {settings}. Goals: replicas follow within"
        f" {GOAL_S:g} s, no request fails.",
        "",
        "| load | requests at once | replicas wanted | there after, s | within the goal | answered | failed |"
        " first token, median, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in found.steps:
        after = "never" if each.followed_s is None else f"{each.followed_s:.1f}"
        met = "yes" if each.followed_s is not None and each.followed_s <= GOAL_S else "no"
        first = f"{1000 * each.ttft_s:.0f}" if each.answered else "-"
        failed = ", ".join(sorted(set(each.failed))) or "none"
        lines.append(
            f"| {each.name} | {each.at_once} | {each.wanted} | {after} | {met} | {each.answered} |"
            f" {len(each.failed)} ({failed}) | {first} |"
        )
    cold = f"failed: {found.cold_error}" if found.cold_error else f"{found.cold_s:.1f} s"
    over_time = ", ".join(f"{at:g} s: {count}" for at, count in found.replicas)
    return [
        *lines,
        "",
        f"Replicas over time: {over_time}.",
        "",
        f"First token of a request that finds no replica (a cold start): {cold}; with one replica, idle:"
        f" {1000 * found.warm_s:.0f} ms.",
        "",
    ]


def choice_page(rates: dict[str, float], replicas: int, arms: list[Arm]) -> list[str]:
    """The second part."""
    lines = [
        "## The choice of a replica",
        "",
        f"{replicas} replicas, {shared_prefixes.PREFIXES} beginnings, one of them in {shared_prefixes.HOT:.0%} of the"
        " requests; arrivals are Poisson. Median of the rounds [smallest, largest], a new server for each.",
    ]
    for kind, rate in rates.items():
        how = shared_prefixes.KINDS[kind]
        lines += [
            "",
            f"Beginnings {kind}: {how.words} words; each replica's cache holds {how.cache_tokens} tokens; {rate:.1f}"
            " requests a second.",
            "",
            "| choice | rounds | prompt tokens cached | first token p50, ms | p95, ms | busiest replica's share of"
            " the work | failed |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(
                _choice_row(choice, [arm for arm in arms if (arm.kind, arm.choice) == (kind, choice)])
                for choice in NAMES
            ),
        ]
    return [*lines, ""]


def _choice_row(choice: str, arms: list[Arm]) -> str:
    values = [
        spread([arm.hits for arm in arms]),
        spread([1000 * arm.ttft_s[0] for arm in arms]),
        spread([1000 * arm.ttft_s[1] for arm in arms]),
        spread([arm.busiest for arm in arms]),
    ]
    hits, half, most, busiest = (
        f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"
        for value, digits in zip(values, (2, 0, 0, 2), strict=True)
    )
    failed = sum(len(arm.failed) for arm in arms)
    return f"| {NAMES[choice]} | {len(arms)} | {hits} | {half} | {most} | {busiest} | {failed} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, a short trace; printed and not saved")
    parser.add_argument("--only", choices=("steps", "choice"), help="one of the two parts; not saved")
    parser.add_argument("--rounds", type=int, default=5, help="of the trace, with each choice")
    parser.add_argument("--requests", type=int, default=400, help="of a trace")
    parser.add_argument("--replicas", type=int, default=3, help="that the trace is sent to")
    parser.add_argument("--hold", type=float, default=15.0, help="seconds of each step after replicas have followed")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick or --only")
    chosen = parser.parse_args()
    rounds, count, hold_s = (1, 60, 3.0) if chosen.quick else (chosen.rounds, chosen.requests, chosen.hold)
    facts = machine.describe()
    lines = ["# Scaling", "", f"`make bench-scaling`; {machine.one_line(facts)}; the demo pair, one thread each.", ""]
    parts: dict[str, object] = {"machine": facts}
    if chosen.only != "choice":
        scaled = load_steps.run(hold_s)
        parts["steps"] = asdict(scaled)
        lines += steps_page(scaled)
    if chosen.only != "steps":
        rates, arms = shared_prefixes.run(rounds, count, chosen.replicas)
        parts["choice"] = {"rates": rates, "arms": [asdict(arm) for arm in arms]}
        lines += choice_page(rates, chosen.replicas, arms)
    page = "\n".join(lines)
    out = chosen.out or (None if chosen.quick or chosen.only else RESULT)
    publish(page, out, parts)


if __name__ == "__main__":
    main()
