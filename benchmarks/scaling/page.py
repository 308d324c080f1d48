"""The simulator's results as a page and a plot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Report
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.sweep import AT_ONCE, LOAD, SHARE, TRAFFIC, Check, Point, saturates_at


def page(costs: Costs, checks: list[Check], points: list[Point]) -> Report:
    """The report; docs/scaling.md says what follows from it."""
    report = Report(
        "A cluster on paper",
        "`make simulate-scaling`. A discrete-event simulation, not a measurement; docs/scaling.md says what it models"
        " and what it leaves out. A pool is two actors with a device each and their coordinator. Requests: a prompt of"
        f" {TRAFFIC.prompt} tokens on average, half of them after one of many beginnings of {TRAFFIC.shared} tokens,"
        f" answers of {TRAFFIC.answer} tokens, drafts of {costs.way.draft} with {costs.way.acceptance:.0%} of the"
        " tokens accepted.",
    )
    report.section("One pool, simulated and measured")
    report.text(
        "Tokens a second of the demo pair in one process. The first two runs set what a step costs in addition to its"
        " forward; the others are predicted."
    )
    report.table(
        None,
        checks,
        {
            "drafts of": lambda row: row.observed.draft or "no drafts",
            "requests at once": lambda row: row.observed.concurrency,
            "measured": lambda row: f"{row.observed.tokens_per_s:.0f}",
            "simulated": lambda row: f"{row.simulated:.0f}",
            "error": lambda row: f"{row.error:+.0%}",
            "": lambda row: "fitted" if row.observed.fitted else "predicted",
        },
    )
    for layout in dict.fromkeys(point.layout for point in points):
        report.section(f"{layout[0].upper()}{layout[1:]}")
        report.text(_summary(points, layout))
        _add_layout(report, [point for point in points if point.layout == layout])
    report.section("Where the costs come from")
    report.text("\n".join(f"- {name}: {source}" for name, source in costs.sources.items()))
    report.picture("tokens a second over pools", lambda path: plot(points, path))
    report.values["checks"] = [asdict(each) | {"observed": each.observed.model_dump()} for each in checks]
    report.values["points"] = [asdict(each) for each in points]
    return report


def _summary(points: list[Point], layout: str) -> str:
    full = saturates_at(points, layout)
    if full is None:
        return "It does not saturate: the pools are what is full."
    text = f"At {full.pools} pools it brings {full.share:.0%} of what they could (saturated: below {SHARE:.0%})."
    return text + (f" Full is: {full.saturated}." if full.saturated else "")


def _add_layout(report: Report, points: list[Point]) -> None:
    report.text(
        f"Rate: {AT_ONCE} requests at once for each pool. Latencies: requests that come at {LOAD:.0%} of one pool's"
        " rate for each, p50 / p99, ms; none where the front cannot carry them. Controller: cores that one cluster's"
        " would need, of one that it has."
    )
    report.table(
        None,
        points,
        {
            "pools": lambda row: row.pools,
            "tokens/s": lambda row: f"{row.full.tokens_per_s:.0f}",
            "of the pools'": lambda row: f"{row.share:.0%}",
            "front carries, requests/s": lambda row: f"{row.bound:.0f}",
            "ingress busy": lambda row: f"{row.full.busy['ingress']:.0%}",
            "devices busy": lambda row: f"{row.full.busy['small device']:.0%}, {row.full.busy['large device']:.0%}",
            "first token": lambda row: _ms(row.loaded.ttft_s) if row.loaded else "-",
            "whole answer": lambda row: _ms(row.loaded.end_to_end_s) if row.loaded else "-",
            "prefix hits": lambda row: f"{row.loaded.hits:.0%}" if row.loaded else "-",
            "busiest pool": lambda row: f"{row.loaded.busiest:.2f}" if row.loaded else "-",
            "controller": lambda row: f"{row.controller:.2f}",
            "it sends, MB/s": lambda row: f"{row.sent_mb_s:.1f}",
            "price of 1M tokens": lambda row: row.per_million,
            "full": lambda row: row.saturated or "pools",
        },
    )


def _ms(seconds: tuple[float, ...]) -> str:
    return f"{1000 * seconds[0]:.0f} / {1000 * seconds[2]:.0f}"


def plot(points: list[Point], path: Path) -> None:
    """Tokens a second, and the price of a million, over the number of pools."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rate, price) = plt.subplots(1, 2, figsize=(10, 4))
    for layout in dict.fromkeys(point.layout for point in points):
        mine = [point for point in points if point.layout == layout]
        pools = [point.pools for point in mine]
        rate.plot(pools, [point.full.tokens_per_s for point in mine], marker="o", label=layout)
        price.plot(pools, [point.per_million for point in mine], marker="o", label=layout)
    first = points[0]
    ideal = [first.full.tokens_per_s / first.pools * point.pools for point in points if point.layout == first.layout]
    rate.plot(sorted({point.pools for point in points}), ideal, ":", color="grey", label="pools alone")
    rate.set_ylabel("tokens a second, all pools")
    price.set_ylabel("price of a million tokens (assumed prices)")
    for axes in (rate, price):
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.set_xlabel("pools")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
