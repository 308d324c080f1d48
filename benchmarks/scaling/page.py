"""The simulator's results as a page and a plot."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling.costs import Costs
from benchmarks.scaling.sweep import AT_ONCE, LOAD, SHARE, TRAFFIC, Check, Point, saturates_at


def to_markdown(costs: Costs, checks: list[Check], points: list[Point]) -> str:
    """The page; docs/scaling.md says what follows from it."""
    lines = [
        "# A cluster on paper",
        "",
        "`make simulate-scaling`. A discrete-event simulation, not a measurement; docs/scaling.md says what it models"
        " and what it leaves out. A pool is two actors with a device each and their coordinator. Requests: a prompt of"
        f" {TRAFFIC.prompt} tokens on average, half of them after one of many beginnings of {TRAFFIC.shared} tokens,"
        f" answers of {TRAFFIC.answer} tokens, drafts of {costs.way.draft} with {costs.way.acceptance:.0%} of the"
        " tokens accepted.",
        "",
        "## One pool, simulated and measured",
        "",
        "Tokens a second of the demo pair in one process. The first two runs set what a step costs beside its forward;"
        " the others are foretold.",
        "",
        "| drafts of | requests at once | measured | simulated | error | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.observed.draft or 'no drafts'} | {each.observed.concurrency} | {each.observed.tokens_per_s:.0f} |"
        f" {each.simulated:.0f} | {each.error:+.0%} | {'fitted' if each.observed.fitted else 'foretold'} |"
        for each in checks
    ]
    for layout in dict.fromkeys(point.layout for point in points):
        lines += ["", f"## {layout[0].upper()}{layout[1:]}", "", *_summary(points, layout), "", *_table(points, layout)]
    lines += ["", "## Where the costs come from", ""]
    lines += [f"- {name}: {source}" for name, source in costs.sources.items()]
    return "\n".join([*lines, "", "![tokens a second over pools](simulated.png)", ""])


def _summary(points: list[Point], layout: str) -> list[str]:
    full = saturates_at(points, layout)
    if full is None:
        said = "It does not saturate: the pools are what is full."
    else:
        said = (
            f"At {full.pools} pools it brings {full.share:.0%} of what they could (saturated: below {SHARE:.0%})."
            + (f" Full is: {full.saturated}." if full.saturated else "")
        )
    return [said]


def _table(points: list[Point], layout: str) -> list[str]:
    lines = [
        f"Rate: {AT_ONCE} requests at once for each pool. Latencies: requests that come at {LOAD:.0%} of one pool's"
        " rate for each, p50 / p99, ms; none where the front cannot carry them. Controller: cores that one cluster's"
        " would need, of one that it has.",
        "",
        "| pools | tokens/s | of the pools' | front carries, requests/s | ingress busy | devices busy | first token |"
        " whole answer | prefix hits | busiest pool | controller | it sends, MB/s | price of 1M tokens | full |",
        "| --- " * 14 + "|",
    ]
    for each in points:
        if each.layout != layout:
            continue
        loaded = each.loaded
        lines.append(
            f"| {each.pools} | {each.full.tokens_per_s:.0f} | {each.share:.0%} | {each.bound:.0f} |"
            f" {each.full.busy['ingress']:.0%} |"
            f" {each.full.busy['small device']:.0%}, {each.full.busy['large device']:.0%} |"
            f" {_ms(loaded.ttft_s) if loaded else '-'} | {_ms(loaded.end_to_end_s) if loaded else '-'} |"
            f" {f'{loaded.hits:.0%}' if loaded else '-'} | {f'{loaded.busiest:.2f}' if loaded else '-'} |"
            f" {each.controller:.2f} | {each.told_mb_s:.1f} | {each.per_million:.3f} | {each.saturated or 'pools'} |"
        )
    return lines


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
