"""Window, minimum stay and effect of Entropy Adaptive Decoding (paper #2): what each is worth at one large share.

The paper has no such ablation. Every combination is calibrated to the same share on held-out problems, and then run on
others, compared with random switching with the same share and run length.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Report, command_line, note, run, signed
from benchmarks.strategies import Arm, ArmResult, run_arm
from benchmarks.switching_arms import ARITHMETIC, CALIBRATION_SEED, SETTINGS, TEST_SEED, Setting, matched, random_line
from experiments.stats.intervals import Interval, bootstrap_mean
from pool.local_pool import LocalPool
from training.calibration_data import Question, QuestionSet
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout, is_correct
from training.data.problem import Problem
from training.knob_calibration import Calibrator, Target
from training.question_runs import Bench, Run
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

WINDOWS = (1, 2, 5)
STAYS = (1, 3, 10)
SMALL_STAYS = (None, 0)  # of the small model: the same, or none at all
EFFECTS = ("next", "current")
PAPER = SETTINGS["paper"]
SHARE = 0.3
# The lower threshold of a band, as a part of the upper one; 1 is one threshold.
BANDS = (1.0, 0.5, 0.2)
MAX_TOKENS = 160
NUM_POINTS = 4
HALVINGS = 6
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination on the test problems.

    Attributes:
        setting: window, minimum stay, effect.
        band: lower threshold over upper threshold.
        threshold: bits.
        adaptive: what it did.
        above: [problems] 1 where it was right, less the same of random switching at its share.
    """

    setting: Setting
    band: float
    threshold: float
    adaptive: ArmResult
    above: npt.NDArray[np.float64]


@dataclass
class Ablation:
    """The runs that all combinations share.

    Args:
        pool: the models.
        calibration: problems that thresholds are found on.
        test: problems that are scored.
        share: of large tokens, aimed at.
    """

    pool: LocalPool
    calibration: list[Problem]
    test: list[Problem]
    share: float = SHARE
    large: Run | None = None

    async def ends(self) -> list[ArmResult]:
        """Each model alone, after a warm-up."""
        await run_arm(self.pool, self.test[:16], Arm("warm-up", "entropy_adaptive"))
        arms = [Arm(f"{role} only", "plain", {"model": role}) for role in ("small", "large")]
        return [await run_arm(self.pool, self.test, arm, AT_ONCE, MAX_TOKENS) for arm in arms]

    async def threshold(self, setting: Setting) -> float:
        """The threshold that gives the share on the calibration problems, or comes nearest to it."""
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        bench = Bench.of(self.pool, sampling, CALIBRATION_SEED, AT_ONCE)
        asked = _questions(self.calibration)
        if self.large is None:
            self.large = await bench.run(asked.questions, "plain", {"model": "large"})
        calibrator = Calibrator(
            bench, asked, "entropy_adaptive", setting.params, num_points=NUM_POINTS, large=self.large
        )
        try:
            found = (await calibrator.measure(Target(large_share=self.share))).calibration
        except TurnoutError:  # the share is beyond the curve's end
            found = (await calibrator.measure(Target(budget=1e9))).calibration
        return found.setting(found.chosen)

    async def band_threshold(self, setting: Setting, band: float, single: float) -> float:
        """The upper threshold of a band that gives the share on the calibration problems: halving, on a log scale.

        Args:
            setting: the rest.
            band: the lower threshold as a part of the upper one.
            single: what gives the share where both are one. A lower lower one makes the large model stay longer, so
                that the upper one lies above.
        """
        low, high = single, single / band**2
        found, off = single, 1.0
        for _ in range(HALVINGS):
            tried = (low * high) ** 0.5
            share = (await self._run(_banded(setting, band, tried), self.calibration)).large_share
            if abs(share - self.share) < off:
                found, off = tried, abs(share - self.share)
            low, high = (tried, high) if share > self.share else (low, tried)
        return found

    async def cell(self, setting: Setting, band: float, threshold: float, ends: list[ArmResult]) -> Cell:
        """Run a combination, and random switching at its share."""
        adaptive = await self._run(_banded(setting, band, threshold), self.test)
        random = await self._run(matched(adaptive, setting), self.test)
        line = random_line([*ends, adaptive, random], random, adaptive.large_share)
        return Cell(setting, band, threshold, adaptive, adaptive.correct - line)

    async def _run(self, arm: Arm, problems: list[Problem]) -> ArmResult:
        return await run_arm(self.pool, problems, arm, AT_ONCE, MAX_TOKENS)


def _banded(setting: Setting, band: float, threshold: float) -> Arm:
    params = {"threshold": threshold, "threshold_down": band * threshold, **setting.params}
    return Arm(f"{setting.title}, band {band:g}", "entropy_adaptive", params)


def _questions(problems: list[Problem]) -> QuestionSet:
    def judge(problem: Problem) -> Any:
        return lambda text: float(is_correct(problem, text))

    asked = tuple(Question(problem.prompt, judge(problem)) for problem in problems)
    return QuestionSet(asked, "exact", "held-out arithmetic", "")


def settings() -> list[Setting]:
    """Every combination."""
    return [
        Setting(
            f"window {window}, stay {stay}{'' if small is None else ', small 0'}, {effect}", window, stay, effect, small
        )
        for effect, window, stay, small in itertools.product(EFFECTS, WINDOWS, STAYS, SMALL_STAYS)
    ]


async def ablated(count: int, calibration: int) -> tuple[str, list[ArmResult], list[Cell]]:
    """Run the ablation on the shipped pair, on one thread: no clock is read. Says which pair it was."""
    config = TurnoutConfig.demo()
    one_thread = config.engine.model_copy(update={"threads": 1})
    pool = LocalPool.load("demo", config.model_copy(update={"engine": one_thread}))
    pair = ", ".join(f"{role} model {pool.model_pool.by_role(role).digest}" for role in ("small", "large"))
    try:
        ablation = Ablation(
            pool,
            heldout(MIDDLE_DIFFICULTY, calibration, seed=CALIBRATION_SEED),
            heldout(MIDDLE_DIFFICULTY, count, seed=TEST_SEED),
        )
        ends, cells = await ablation.ends(), []
        for setting in settings():
            note(setting.title)
            cells.append(await ablation.cell(setting, 1.0, await ablation.threshold(setting), ends))
        best = max(cells, key=lambda cell: cell.above.mean())
        for band in BANDS[1:]:
            threshold = await ablation.band_threshold(best.setting, band, best.threshold)
            cells.append(await ablation.cell(best.setting, band, threshold, ends))
        return pair, ends, cells
    finally:
        await pool.close()


def effects(cells: list[Cell]) -> list[tuple[str, Interval]]:
    """What each choice is worth: the mean difference to random switching over all combinations that have it."""
    single = [cell for cell in cells if cell.band == 1.0]
    found: list[tuple[str, Interval]] = []
    for name, of in (
        ("window", "window"),
        ("minimum stay", "min_stay"),
        ("stay of the small model", "min_stay_small"),
        ("effect", "effect"),
    ):
        for level in dict.fromkeys(getattr(cell.setting, of) for cell in single):
            chosen = [cell.above for cell in single if getattr(cell.setting, of) == level]
            shown = "the same" if level is None else level
            found.append((f"{name} {shown}", bootstrap_mean(np.mean(chosen, axis=0), seed=len(found))))
    return found


def page(pair: str, ends: list[ArmResult], cells: list[Cell]) -> Report:
    """The report."""
    small, large = ends
    report = Report(
        "Ablation of Entropy Adaptive Decoding",
        f"`make bench-ead-ablation`; {len(large.outcomes)} held-out problems, difficulty {MIDDLE_DIFFICULTY}; the demo"
        f" pair ({pair}), greedy, {AT_ONCE} requests at a time. Each combination's threshold was calibrated to"
        f" {SHARE:.0%} large tokens on other held-out problems (`turnout calibrate`). Intervals are 95%"
        " (accuracy: Wilson; differences: paired bootstrap over problems). Above random: accuracy less that of random"
        " switching at the same share, with runs of the same mean length and the same model first. Large tokens are all"
        " that the large model wrote, dropped ones included, per token of the answers. Costs are relative to the large"
        " model alone.",
    )
    report.text(f"Small model alone: {small.accuracy}. Large model alone: {large.accuracy}.")
    report.table(
        None,
        list(enumerate(cells)),
        {
            "window": lambda row: row[1].setting.window,
            "minimum stay": lambda row: row[1].setting.stay,
            "effect": lambda row: row[1].setting.effect,
            "band": lambda row: f"{row[1].band:g}",
            "threshold": lambda row: f"{row[1].threshold:.4g}",
            "large tokens": lambda row: f"{row[1].adaptive.large_share:.1%}",
            "accuracy": lambda row: row[1].adaptive.accuracy,
            "of large": lambda row: f"{row[1].adaptive.correct.mean() / large.correct.mean():.1%}",
            "above random": lambda row: signed(bootstrap_mean(row[1].above, seed=row[0])),
            "mean run": lambda row: f"{row[1].adaptive.mean_run:.1f}",
            "paper cost": lambda row: row[1].adaptive.paper_cost,
            "FLOPs": lambda row: row[1].adaptive.flops / large.flops,
        },
    )
    report.text(
        "A band of 0.5 means that the large model hands back at half the threshold at which it takes over; both are"
        f" moved until it writes {SHARE:.0%} on the calibration problems, {HALVINGS} times halving where they may lie."
    )
    report.section("What each choice is worth")
    report.text("Difference to random switching, averaged over all combinations with that choice (one threshold).")
    report.table(None, effects(cells), {"choice": lambda row: row[0], "above random": lambda row: signed(row[1])})
    report.text(verdict(cells))
    report.values["cells"] = [
        {
            **cell.setting.params,
            "band": cell.band,
            "threshold": cell.threshold,
            "large_share": cell.adaptive.large_share,
            "accuracy": float(cell.adaptive.correct.mean()),
            "above_random": float(cell.above.mean()),
        }
        for cell in cells
    ]
    return report


def verdict(cells: list[Cell]) -> str:
    """The best combination, and whether it differs from the paper's."""
    single = [cell for cell in cells if cell.band == 1.0]
    best = max(single, key=lambda cell: cell.above.mean())
    paper = next(cell for cell in single if replace(cell.setting, title=PAPER.title) == PAPER)
    gain = bootstrap_mean(best.above - paper.above, seed=1)
    apart = "above" if gain.low > 0 else "not distinguishable from"
    return (
        f"Best combination: {best.setting.title}, {signed(bootstrap_mean(best.above, seed=0))} above random switching;"
        f" {apart} the paper's choice (window 5, stay 10, next), difference {signed(gain)}. It is the best of"
        f" {len(single)} on these problems, which its interval does not know."
    )


async def measure(options: argparse.Namespace) -> Report:
    """Run the ablation."""
    return page(*await ablated(options.problems, options.calibration))


def parser() -> argparse.ArgumentParser:
    """Make the options."""
    made = command_line(
        __doc__, Path("docs/results/ead_ablation.md"), rounds=None, demo_only=ARITHMETIC, problems=16, calibration=8
    )
    made.add_argument("--problems", type=int, default=240)
    made.add_argument("--calibration", type=int, default=48)
    return made


if __name__ == "__main__":
    run(parser(), measure)
