"""Entropy Adaptive Decoding on the demo pair (seed 2): accuracy against what the large model was used for.

Small alone, large alone, entropy_adaptive at five thresholds, and random switching with the same share and run
length as each of them, on held-out arithmetic of middle difficulty; once with the paper's window and minimum stay,
and with settings for answers as short as the demo's. Thresholds are quantiles of the small model's rolling mean
entropy on other held-out problems, chosen before anything is scored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.pool import LocalPool
from experiments.arms import Arm, ArmResult, run_arm
from experiments.report import show
from experiments.statistics import Interval, bootstrap_mean, wilson
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from training.data.problem import Problem
from turnout.config import TurnoutConfig

CALIBRATION_SEED = 1
TEST_SEED = 2
QUANTILES = (0.35, 0.5, 0.62, 0.74, 0.86)
PAPER_RETENTION = 0.929


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same over a sweep: window and minimum stay in tokens, and when a switch acts."""

    title: str
    window: int
    min_stay: int
    effect: str

    @property
    def params(self) -> dict[str, Any]:
        """As parameters of `entropy_adaptive`."""
        return {"window": self.window, "min_stay": self.min_stay, "effect": self.effect}


SETTINGS = {
    "paper": Setting("the paper's setting", window=5, min_stay=10, effect="next"),
    "short": Setting("a setting for short answers", window=2, min_stay=3, effect="next"),
    "current": Setting("the uncertain token itself is written again", window=1, min_stay=2, effect="current"),
}


async def calibrate(pool: LocalPool, setting: Setting, count: int) -> list[float]:
    """Thresholds in bits: quantiles of the small model's rolling mean entropy where a switch would be allowed."""
    problems = heldout(MIDDLE_DIFFICULTY, count, seed=CALIBRATION_SEED)
    # A threshold nothing exceeds: the small model writes everything, and its entropies are read on the way.
    arm = Arm("calibration", "entropy_adaptive", {"threshold": 64.0, "window": setting.window})
    result = await run_arm(pool, problems, arm)
    means: list[float] = []
    for outcome in result.outcomes:  # quantiles of what the rule looks at, at the places where it may act
        recent: deque[float] = deque(maxlen=setting.window)
        for place, token in enumerate(outcome.tokens, start=1):
            assert token.entropy_bits is not None
            recent.append(token.entropy_bits)
            if place >= setting.min_stay:
                means.append(sum(recent) / len(recent))
    return [round(float(value), 4) for value in np.quantile(means, QUANTILES)]


async def alone(pool: LocalPool, problems: list[Problem]) -> list[ArmResult]:
    """Each model by itself, after a warm-up."""
    await run_arm(pool, problems[:16], Arm("warm-up", "entropy_adaptive"))
    return [await run_arm(pool, problems, Arm(f"{role} only", "plain", {"model": role})) for role in ("small", "large")]


async def sweep(pool: LocalPool, problems: list[Problem], setting: Setting, calibration: int) -> list[ArmResult]:
    """entropy_adaptive at every threshold, each followed by its random baseline."""
    results: list[ArmResult] = []
    for threshold in await calibrate(pool, setting, calibration):
        arm = Arm(f"entropy {threshold:g}", "entropy_adaptive", {"threshold": threshold, **setting.params})
        adaptive = await run_arm(pool, problems, arm)
        results.append(adaptive)
        results.append(await run_arm(pool, problems, matched(adaptive, setting)))
    return results


def matched(adaptive: ArmResult, setting: Setting) -> Arm:
    """Random switching with the adaptive arm's share and mean run length.

    Answers are short and their last run is cut, so measured runs can be shorter than the minimum stay; the
    baseline's minimum stay is lowered to what its mean run lengths allow.
    """
    share, mean_run = min(max(adaptive.large_share, 0.01), 0.99), adaptive.mean_run
    shortest = 2.0 * min(share, 1.0 - share) * mean_run
    mean_run = max(mean_run, mean_run / shortest) if shortest < 1.0 else mean_run
    params = {"share": share, "mean_run": mean_run, "min_stay": max(1, min(setting.min_stay, int(shortest)))}
    return Arm(f"random for {adaptive.arm.name}", "random_switch", params)


@dataclass(frozen=True, slots=True)
class Line:
    """One arm in the report. `retention` is accuracy relative to the large model alone."""

    name: str
    accuracy: Interval
    retention: float
    large_share: float
    paper_cost: float
    flops: float
    wall: float
    mean_run: float
    above_random: Interval | None


def summarise(results: list[ArmResult]) -> list[Line]:
    """The report's lines: costs relative to the large model alone, and each adaptive arm against the random line."""
    large = next(result for result in results if result.arm.name == "large only")
    lines = []
    for place, result in enumerate(results):
        correct = result.correct
        above = None
        if result.arm.method == "entropy_adaptive":
            difference = correct - random_line(results, results[place + 1], result.large_share)
            above = bootstrap_mean(difference, seed=place)
        lines.append(
            Line(
                name=result.arm.name,
                accuracy=wilson(int(correct.sum()), len(correct)),
                retention=float(correct.mean() / large.correct.mean()),
                large_share=result.large_share,
                paper_cost=result.paper_cost,
                flops=result.flops / large.flops,
                wall=result.wall_s / large.wall_s,
                mean_run=result.mean_run,
                above_random=above,
            )
        )
    return lines


def random_line(results: list[ArmResult], random: ArmResult, share: float) -> np.ndarray:
    """Per-problem accuracy of random switching at exactly `share`.

    The matched random arm's own share differs a little from what was asked for; it is moved to `share` along the
    straight line from small alone to large alone, per problem.
    """
    small = next(result for result in results if result.arm.name == "small only")
    large = next(result for result in results if result.arm.name == "large only")
    slope = float(large.correct.mean() - small.correct.mean())
    return random.correct + slope * (share - random.large_share)


def heading(count: int) -> list[str]:
    """What was measured and how."""
    return [
        f"# Entropy Adaptive Decoding on the demo pair ({count} held-out problems, difficulty {MIDDLE_DIFFICULTY})",
        "",
        "`make bench-ead`; lazy catch-up, greedy, 16 requests at a time. Intervals are 95% (accuracy: Wilson;"
        " difference: paired bootstrap over problems). Costs are relative to the large model alone in the same run."
        f" Thresholds are the quantiles {', '.join(map(str, QUANTILES))} of the small model's rolling mean entropy"
        " (bits) on other held-out problems. The random arm below each threshold has the same share and run length;"
        ' "above random" compares with it at exactly the same share.',
    ]


def to_markdown(lines: list[Line], setting: Setting) -> str:
    """One setting's table."""
    text = [
        f"## {setting.title[0].upper()}{setting.title[1:]}: window {setting.window}, minimum stay {setting.min_stay},"
        f" effect {setting.effect}",
        "",
        "| arm | accuracy | of large | large tokens | paper cost | FLOPs | wall clock | mean run | above random |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        above = "" if line.above_random is None else f"{line.above_random.value:+.3f}"
        above += "" if line.above_random is None else f" [{line.above_random.low:+.3f}, {line.above_random.high:+.3f}]"
        text.append(
            f"| {line.name} | {line.accuracy} | {line.retention:.1%} | {line.large_share:.1%} | {line.paper_cost:.3f} "
            f"| {line.flops:.3f} | {line.wall:.2f} | {line.mean_run:.1f} | {above} |"
        )
    return "\n".join([*text, "", verdict(lines), ""])


def verdict(lines: list[Line]) -> str:
    """The paper's shape, met or not: 92.9% of the large model's accuracy at 25-45% large tokens, above random."""
    inside = [line for line in lines if line.above_random is not None and 0.25 <= line.large_share <= 0.45]
    if not inside:
        return "No threshold put the share of large tokens between 25% and 45%: the goal is not measured."
    best = max(inside, key=lambda line: line.retention)
    assert best.above_random is not None
    met = best.retention >= PAPER_RETENTION and best.above_random.low > 0
    return (
        f"Goal (at least {PAPER_RETENTION:.1%} of the large model's accuracy at 25-45% large tokens, above random"
        f" switching): {'met' if met else 'not met'}. Best inside the band: {best.name}, {best.retention:.1%} at"
        f" {best.large_share:.1%} large tokens, {best.above_random.value:+.3f} against random switching."
    )


def plot(tables: dict[str, list[Line]], path: Path) -> None:
    """Accuracy over the share of large tokens, one panel a setting."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(tables), figsize=(5 * len(tables), 4.2), sharey=True, squeeze=False)
    for axes, (name, lines) in zip(panels[0], tables.items(), strict=True):
        setting = SETTINGS[name]
        ends = [line for line in lines if line.name.endswith(" only")]
        for prefix, marker, label in (("entropy", "o", "entropy_adaptive"), ("random", "s", "random, same share")):
            _errorbars(axes, [line for line in lines if line.name.startswith(prefix)], marker, label)
        _errorbars(axes, ends, "^", "one model alone")
        axes.plot([line.large_share for line in ends], [line.accuracy.value for line in ends], ":", color="grey")
        axes.set_title(f"window {setting.window}, stay {setting.min_stay}, effect {setting.effect}", fontsize=10)
        axes.set_xlabel("share of tokens written by the large model")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy, 95% interval")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _errorbars(axes: Any, lines: list[Line], marker: str, label: str) -> None:
    value = np.array([line.accuracy.value for line in lines])
    low = value - np.array([line.accuracy.low for line in lines])
    high = np.array([line.accuracy.high for line in lines]) - value
    axes.errorbar(
        [line.large_share for line in lines], value, yerr=[low, high], marker=marker, linestyle="", label=label
    )


def save(tables: dict[str, list[Line]], count: int, folder: Path, name: str) -> None:
    """Write the tables, the plot and the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [to_markdown(lines, SETTINGS[setting]) for setting, lines in tables.items()]
    text = "\n".join([*heading(count), "", *parts])
    (folder / f"{name}.md").write_text(f"{text}\n![accuracy over share]({name}.png)\n")
    numbers = {setting: [_plain(line) for line in lines] for setting, lines in tables.items()}
    (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    plot(tables, folder / f"{name}.png")
    show(text)


def _plain(line: Line) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in Line.__dataclass_fields__:
        value = getattr(line, key)
        values[key] = [value.value, value.low, value.high] if isinstance(value, Interval) else value
    return values


async def measure(count: int, calibration: int, names: list[str]) -> dict[str, list[Line]]:
    """Run the benchmark on the shipped pair."""
    pool = LocalPool.load("demo", TurnoutConfig.demo())
    problems = heldout(MIDDLE_DIFFICULTY, count, seed=TEST_SEED)
    try:
        ends = await alone(pool, problems)
        return {name: summarise(ends + await sweep(pool, problems, SETTINGS[name], calibration)) for name in names}
    finally:
        await pool.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--calibration", type=int, default=200)
    parser.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--name", default="ead")
    chosen = parser.parse_args()
    tables = asyncio.run(measure(chosen.problems, chosen.calibration, chosen.settings))
    save(tables, chosen.problems, chosen.out, chosen.name)


if __name__ == "__main__":
    main()
