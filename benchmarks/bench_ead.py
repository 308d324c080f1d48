"""Entropy Adaptive Decoding on the demo pair (paper #2): accuracy against what the large model was used for.

Small alone, large alone, entropy_adaptive at several thresholds, and random switching with the same start, share and
run length as each of them, on held-out arithmetic and on prompts of all kinds; with the paper's window and minimum
stay, and with settings for answers as short as the demo's. Thresholds are quantiles of the small model's rolling mean
entropy on other held-out problems, chosen before anything is scored. Judged by what is kept of the large model's
accuracy where it writes 25% and 43% of the tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, command_line, note, run, signed
from benchmarks.retention import RETENTIONS, Retention, Spent, judged, kept_at, percent
from benchmarks.strategies import Arm, ArmResult, run_arm
from benchmarks.switching_arms import (
    ARITHMETIC,
    QUANTILES,
    SETTINGS,
    Prompts,
    Setting,
    arithmetic,
    calibrate,
    matched,
    mixed,
    random_line,
)
from experiments.machine import describe
from experiments.stats.intervals import Floats, Interval, bootstrap_mean
from pool.local_pool import LocalPool
from turnout.config import TurnoutConfig

RESULT = Path("docs/results/ead.md")
KINDS = ("arithmetic", "mixed")
CLOSE = 0.01  # as near as the random arm's share of large tokens comes to the adaptive arm's, or is tried to


async def alone(pool: LocalPool, prompts: Prompts) -> list[ArmResult]:
    """Each model by itself, after a warm-up."""
    await run_arm(pool, prompts.asked[:16], Arm("warm-up", "entropy_adaptive"))
    arms = [Arm(f"{role} only", "plain", {"model": role}) for role in ("small", "large")]
    return [await run_arm(pool, prompts.asked, arm, max_tokens=prompts.max_tokens) for arm in arms]


async def sweep(pool: LocalPool, prompts: Prompts, setting: Setting) -> list[ArmResult]:
    """entropy_adaptive at every threshold, each followed by its random baseline."""
    results: list[ArmResult] = []
    for threshold in await calibrate(pool, setting, prompts):
        note(f"{prompts.title}, {setting.title}, threshold {threshold:g}")
        arm = Arm(f"entropy {threshold:g}", "entropy_adaptive", {"threshold": threshold, **setting.params})
        adaptive = await run_arm(pool, prompts.asked, arm, max_tokens=prompts.max_tokens)
        random = await run_arm(pool, prompts.asked, matched(adaptive, setting), max_tokens=prompts.max_tokens)
        if abs(random.large_share - adaptive.large_share) > CLOSE:  # its answers are shorter or longer
            again = matched(adaptive, setting, random)
            random = await run_arm(pool, prompts.asked, again, max_tokens=prompts.max_tokens)
        results += [adaptive, random]
    return results


@dataclass(frozen=True, slots=True)
class Line:
    """One arm in the report; costs are relative to the large model alone.

    Attributes:
        retention: accuracy relative to the large model alone.
        large_share: tokens the large model wrote, dropped ones included, per token of the answers.
        large_kept_share: of the answers' tokens, the large model's.
        cpu: processor time; NaN where it was not measured.
        above_random: accuracy less that of random switching at the same share; of adaptive arms.
        above_choice: by FLOPs and by processor time, accuracy less that of sending whole prompts, drawn by chance, to
            the large model for the same cost; of arms that switch.
        earliest: part of the answers with two hand-overs or more in which each came as early as the minimum stay
            allowed; None where the minimum stay cannot be read off the runs.
    """

    name: str
    accuracy: Interval
    retention: float
    large_share: float
    large_kept_share: float
    paper_cost: float
    flops: float
    wall: float
    cpu: float
    mean_run: float
    above_random: Interval | None
    above_choice: tuple[Interval, Interval] | None
    earliest: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Quality that one setting of window and stay keeps where the large model writes the share of a goal.

    Attributes:
        kept: of the large model's accuracy; NaN where the thresholds do not bracket the share.
        above: accuracy less that of random switching at that share; None likewise.
        better: the best threshold with fewer large tokens: its name, share, accuracy less that at the goal's share;
            None where none is better.
    """

    goal: Retention
    kept: Interval
    above: Interval | None
    better: tuple[str, float, Interval] | None

    def __str__(self) -> str:
        at = f"At {self.goal.share:.0%} large tokens"
        if self.above is None:
            goal = judged(self.kept, self.goal.goal)
            return f"- {at}: no two thresholds with that share between them; {goal}."
        text = (
            f"- {at}: {percent(self.kept)} of the large model's accuracy is kept, {signed(self.above)} against random"
            f" switching; {judged(self.kept, self.goal.goal)}."
        )
        if self.better is not None:
            name, share, gain = self.better
            text += f" Fewer large tokens do better here: {name}, {share:.1%} of the tokens, accuracy {signed(gain)}."
        return text


@dataclass(frozen=True, slots=True)
class Table:
    """Results of one setting at all thresholds on one kind of prompts."""

    setting: Setting
    lines: list[Line]
    verdicts: list[Verdict]
    prompts: str = ""

    @property
    def title(self) -> str:
        """Of setting and prompts."""
        return f"{self.setting.title}, {self.prompts}" if self.prompts else self.setting.title


def spent(result: ArmResult) -> Spent:
    """An arm's scores and tokens, problem by problem."""
    tokens = np.array([float(each.usage.completion_tokens) for each in result.outcomes])
    shares = np.array([each.usage.cost.large_share for each in result.outcomes])
    return Spent(result.correct, shares * tokens, tokens)


def judge(results: list[ArmResult], goal: Retention) -> Verdict:
    """A goal, from the models alone and all thresholds of one setting, each followed by its random baseline."""
    small, large = results[:2]
    switched = {result.large_share: (result, place) for place, result in enumerate(results) if _adaptive(result)}
    kept = kept_at([spent(small), *(spent(result) for result, _ in switched.values())], large.correct, goal.share)
    if np.isnan(kept.value):
        return Verdict(goal, kept, None, None)
    points = {0.0: (small.correct, np.zeros(len(small.correct)))}
    for share, (result, place) in switched.items():
        points[share] = (result.correct, result.correct - random_line(results, results[place + 1], share))
    correct, above = between(points, goal.share)
    fewer = {share: result for share, (result, _) in switched.items() if share < goal.share}
    better = None
    if fewer:
        share, best = max(fewer.items(), key=lambda each: each[1].correct.mean())
        gain = bootstrap_mean(best.correct - correct, seed=1)
        better = (best.arm.name, share, gain) if gain.value > 0 else None
    return Verdict(goal, kept, bootstrap_mean(above, seed=0), better)


def between(points: dict[float, tuple[Floats, Floats]], share: float) -> tuple[Floats, Floats]:
    """Both figures of each problem at a share, on the line between the points next to it; the share is within them."""
    high = min(each for each in points if each >= share)
    low = max(each for each in points if each <= share)
    part = (share - low) / (high - low) if high > low else 0.0
    first, second = ((1 - part) * a + part * b for a, b in zip(points[low], points[high], strict=True))
    return first, second


def _adaptive(result: ArmResult) -> bool:
    return result.arm.method == "entropy_adaptive"


def earliest(result: ArmResult, setting: Setting) -> float | None:
    """See `Line.earliest`; a dropped token leaves no trace in the runs, and a stay of one token holds nothing back."""
    if setting.effect == "current" or setting.min_stay == 1 or not _adaptive(result):
        return None
    runs = [[len(list(run)) for _, run in groupby(each.tokens, lambda token: token.source)] for each in result.outcomes]
    held = [len(each) > 2 and set(each[:-1]) == {setting.min_stay} for each in runs]
    return sum(held) / len(held)


def above_choice(result: ArmResult, small: ArmResult, large: ArmResult, costs: tuple[float, float, float]) -> Floats:
    """Per-problem accuracy above that of a random choice of one model for each prompt, for the same cost.

    Args:
        result: the arm.
        small: the small model alone.
        large: the large model alone; what costs more is compared with it.
        costs: of the three, in any one unit.
    """
    mine, low, high = costs
    part = min(max((mine - low) / (high - low), 0.0), 1.0) if high > low else 1.0
    chosen: Floats = small.correct + part * (large.correct - small.correct)
    return result.correct - chosen


def summarise(results: list[ArmResult], setting: Setting) -> list[Line]:
    """The report's lines: costs relative to the large model alone, and each adaptive arm against the random line."""
    small, large = (next(each for each in results if each.arm.name == f"{role} only") for role in ("small", "large"))
    lines = []
    for place, result in enumerate(results):
        correct = result.correct
        above = None
        if _adaptive(result):
            difference = correct - random_line(results, results[place + 1], result.large_share)
            above = bootstrap_mean(difference, seed=place)
        choice = None
        if result.arm.method != "plain":
            by_flops = above_choice(result, small, large, (result.flops, small.flops, large.flops))
            by_time = above_choice(result, small, large, (result.cpu_s, small.cpu_s, large.cpu_s))
            choice = (bootstrap_mean(by_flops, seed=place), bootstrap_mean(by_time, seed=place))
        lines.append(
            Line(
                name=result.arm.name,
                accuracy=result.accuracy,
                retention=float(correct.mean() / large.correct.mean()),
                large_share=result.large_share,
                large_kept_share=result.large_kept_share,
                paper_cost=result.paper_cost,
                flops=result.flops / large.flops,
                wall=result.wall_s / large.wall_s,
                cpu=result.cpu_s / large.cpu_s if large.cpu_s else float("nan"),
                mean_run=result.mean_run,
                above_random=above,
                above_choice=choice,
                earliest=earliest(result, setting),
            )
        )
    return lines


def page(
    kinds: list[Prompts],
    tables: list[Table],
    machine: dict[str, str] | None = None,
    title: str = "Entropy Adaptive Decoding on the demo pair",
    command: str = "make bench-ead",
) -> Report:
    """The report of all settings on all kinds of prompts; `command` makes its page."""
    goals = ", ".join(f"{goal.least:.1%} at {goal.share:.0%} large tokens" for goal in RETENTIONS)
    counts = "; ".join(f"{len(each.asked)} of {each.title}" for each in kinds)
    report = Report(
        title,
        f"`{command}`. Held-out prompts: {counts}. Lazy catch-up, greedy, 16 requests at a time,"
        " one thread a forward. Intervals are 95% (accuracy: Wilson, of worksheets a"
        " bootstrap over prompts; differences: paired bootstrap over prompts). Costs"
        " are relative to the large model alone in the same run; *time* is processor time, which other processes"
        f" disturb less than the wall clock. Thresholds are the quantiles {', '.join(map(str, QUANTILES))} of the"
        " small model's rolling mean entropy (bits) on other held-out prompts.",
        machine=machine,
    )
    report.text(
        "*Large tokens* are those that the large model wrote, those included that a switch dropped, per token of the"
        " answers; *kept* are those that stayed. The random arm below each threshold starts with the same model"
        " (the small one) and has about the same share of large tokens, and runs of about the same length (up to a"
        " quarter shorter). *Above random*: accuracy less that of"
        " random switching at exactly the same share. *Above choice*: accuracy less that of sending whole prompts,"
        " drawn by chance, to the large model for the same cost, by FLOPs and by time; where an arm costs more than"
        " the large model alone, less that of the large model. *Earliest*: part of all answers that have two"
        " hand-overs or more, each as early as the minimum stay allows; there the entropy decides nothing."
    )
    report.text(
        f"Goals, as parts of the large model's accuracy: {goals}. What is kept there is read off the straight line"
        " between the two thresholds around that share, not smoothed, with its bootstrap interval over prompts."
    )
    for table in tables:
        _add_table(report, table)
        report.values[table.title] = _plain(table)
    report.picture("accuracy over share", lambda path: plot(tables, path))
    return report


def _add_table(report: Report, table: Table) -> None:
    """One setting's table, and whether it meets the goals."""
    setting = table.setting
    report.section(
        f"{table.title[0].upper()}{table.title[1:]}: window {setting.window}, minimum stay {setting.stay},"
        f" effect {setting.effect}"
    )
    report.table(
        None,
        table.lines,
        {
            "arm": lambda row: row.name,
            "accuracy": lambda row: row.accuracy,
            "of large": lambda row: f"{row.retention:.1%}",
            "large tokens": lambda row: f"{row.large_share:.1%}",
            "kept": lambda row: f"{row.large_kept_share:.1%}",
            "paper cost": lambda row: row.paper_cost,
            "FLOPs": lambda row: row.flops,
            "time": lambda row: f"{row.cpu:.2f}",
            "wall clock": lambda row: f"{row.wall:.2f}",
            "mean run": lambda row: f"{row.mean_run:.1f}",
            "earliest": lambda row: None if row.earliest is None else f"{row.earliest:.0%}",
            "above random": lambda row: row.above_random and signed(row.above_random),
            "above choice, FLOPs": lambda row: row.above_choice and signed(row.above_choice[0]),
            "above choice, time": lambda row: row.above_choice and signed(row.above_choice[1]),
        },
    )
    report.text("\n".join(map(str, table.verdicts)))


def plot(tables: list[Table], path: Path) -> None:
    """Accuracy over the share of large tokens, one panel a setting."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(tables), figsize=(5 * len(tables), 4.2), sharey=True, squeeze=False)
    for axes, table in zip(panels[0], tables, strict=True):
        lines = table.lines
        ends = [line for line in lines if line.name.endswith(" only")]
        for prefix, marker, label in (("entropy", "o", "entropy_adaptive"), ("random", "s", "random, same share")):
            _errorbars(axes, [line for line in lines if line.name.startswith(prefix)], marker, label)
        _errorbars(axes, ends, "^", "one model alone")
        axes.plot([line.large_share for line in ends], [line.accuracy.value for line in ends], ":", color="grey")
        axes.set_title(table.title, fontsize=10)
        axes.set_xlabel("tokens written by the large model, per token of the answers")
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


def _plain(table: Table) -> dict[str, Any]:
    return {
        "lines": [asdict(line) for line in table.lines],
        "goals": [
            {**asdict(verdict), "verdict": judged(verdict.kept, verdict.goal.goal)} for verdict in table.verdicts
        ],
    }


async def swept(kinds: list[Prompts], settings: Sequence[Setting], config: TurnoutConfig) -> list[Table]:
    """Run all settings on the first pool of a configuration."""
    one_thread = config.engine.model_copy(update={"threads": 1})
    pool = LocalPool.load(next(iter(config.pools)), config.model_copy(update={"engine": one_thread}))
    tables = []
    try:
        for prompts in kinds:
            ends = await alone(pool, prompts)
            for setting in settings:
                results = ends + await sweep(pool, prompts, setting)
                verdicts = [judge(results, goal) for goal in RETENTIONS]
                tables.append(Table(setting, summarise(results, setting), verdicts, prompts.title))
        return tables
    finally:
        await pool.close()


async def measure(options: argparse.Namespace) -> Report:
    """Run the settings that were chosen."""
    machine = describe()
    made = {
        "arithmetic": lambda: arithmetic(options.problems, options.calibration),
        "mixed": lambda: mixed(options.part, options.calibration),
    }
    kinds = [made[name]() for name in options.prompts]
    tables = await swept(kinds, [SETTINGS[name] for name in options.settings], TurnoutConfig.demo())
    return page(kinds, tables, machine)


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(__doc__, RESULT, rounds=None, demo_only=ARITHMETIC, problems=64, part=0.03, calibration=32)
    made.add_argument("--problems", type=int, default=500, help="of arithmetic; absent: 500, 64 with --quick")
    made.add_argument("--part", type=float, default=0.25, help="of the mixed prompts; absent: 0.25, 0.03 with --quick")
    made.add_argument("--calibration", type=int, default=200, help="absent: 200, 32 with --quick")
    made.add_argument("--prompts", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=list(SETTINGS))
    return made


if __name__ == "__main__":
    run(parser(), measure)
