"""Settings of Entropy Adaptive Decoding that benchmarks compare, their thresholds, and the random baseline of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.strategies import Arm, ArmResult, Asked, run_arm
from decoding.model import Readout
from decoding.switching.random_run import RandomRunSwitch
from experiments.grid.datasets import open_dataset
from experiments.grid.spec import read_spec
from pool.local_pool import LocalPool
from training.calibration_data import DEMO, FEWEST, Question, demo_questions, is_right
from training.data import worksheets
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from training.data.problem import Problem

# Why a benchmark of these arms runs on the demo pair only.
ARITHMETIC = "it scores answers to arithmetic, which that pair was trained on"
CALIBRATION_SEED = 1
TEST_SEED = 2
# The lowest one is to have the large model write more than the 43% of the higher goal.
QUANTILES = (0.25, 0.35, 0.5, 0.62, 0.74, 0.86)
FRONTIER = Path("ops/experiments/frontier.yaml")
LEAST_SHARE, HALVINGS = 0.01, 12


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a sweep: window and minimum stays in tokens, when a switch acts, and who writes first.

    `min_stay_small` is the small model's and `effect_back` the large one's, where they have ones of their own. The
    random baseline starts with the same model.
    """

    title: str
    window: int
    min_stay: int
    effect: str
    min_stay_small: int | None = None
    effect_back: str | None = None
    start: str = "small"

    @property
    def params(self) -> dict[str, Any]:
        """As parameters of `entropy_adaptive`, none left for the pool's own setting to fill."""
        return {name: each for name, each in asdict(self).items() if name != "title"}

    @property
    def stay(self) -> str:
        """Of both models in words."""
        return str(self.min_stay) if self.min_stay_small is None else f"{self.min_stay}, small {self.min_stay_small}"

    @property
    def small_stay(self) -> int:
        """Tokens that the small model writes before it may hand over, the one that tips the mean among them."""
        least = self.min_stay if self.min_stay_small is None else self.min_stay_small
        return max(least, 1)


SETTINGS = {
    "paper": Setting("the paper's rule", window=5, min_stay=10, effect="next"),
    "short": Setting("a setting for short answers", window=2, min_stay=3, effect="next"),
    "current": Setting("the uncertain token itself is written again", window=1, min_stay=2, effect="current"),
    "each": Setting(
        "the default's gate for each token",
        window=1,
        min_stay=1,
        effect="current",
        min_stay_small=0,
        effect_back="next",
    ),
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one kind.

    Attributes:
        title: for the page.
        asked: what is scored.
        calibration: others, on which thresholds are chosen.
        max_tokens: longest answer.
    """

    title: str
    asked: Sequence[Asked]
    calibration: Sequence[Asked]
    max_tokens: int


def arithmetic(count: int, calibration: int) -> Prompts:
    """Held-out arithmetic of middle difficulty."""
    return Prompts(
        f"arithmetic, difficulty {MIDDLE_DIFFICULTY}",
        heldout(MIDDLE_DIFFICULTY, count, seed=TEST_SEED),
        heldout(MIDDLE_DIFFICULTY, calibration, seed=CALIBRATION_SEED),
        160,
    )


def sheets(count: int, calibration: int) -> Prompts:
    """Held-out worksheets, scored by the part of their problems that is right."""
    asked, others = (
        [Question(sheet.prompt, partial(worksheets.share_right, sheet)) for sheet in drawn]
        for drawn in (
            worksheets.heldout(MIDDLE_DIFFICULTY, count, seed=TEST_SEED),
            worksheets.heldout(MIDDLE_DIFFICULTY, calibration, seed=CALIBRATION_SEED),
        )
    )
    return Prompts(f"worksheets, difficulty {MIDDLE_DIFFICULTY}", asked, others, 900)


def mixed(part: float, calibration: int, path: Path = FRONTIER) -> Prompts:
    """A part of the prompts of the frontier experiment, of every kind as large a one, all grades alike.

    Args:
        part: of the prompts, above 0, at most 1.
        calibration: about how many others thresholds are chosen on.
        path: the experiment.
    """
    spec = read_spec(path)
    datasets = [(choice, open_dataset(choice).items) for choice in spec.datasets]
    whole = sum(len(items) for _, items in datasets)
    asked, others = list[Question](), list[Question]()
    for choice, items in datasets:
        assert choice.demo is not None
        task = DEMO[choice.demo]
        for item in items[: max(round(part * len(items)), 1)]:
            asked.append(Question(item.prompt, partial(is_right, task, Problem(**item.fields))))
        others += demo_questions(choice.demo, max(round(calibration * len(items) / whole), FEWEST)).questions
    scored = {question.prompt for question in asked}
    others = [question for question in others if question.prompt not in scored]
    return Prompts("mixed prompts", asked, others, spec.sampling.max_tokens)


async def calibrate(
    pool: LocalPool, setting: Setting, prompts: Prompts, quantiles: Sequence[float] = QUANTILES
) -> list[float]:
    """Thresholds in bits: quantiles of the small model's rolling mean entropy where a switch would be allowed."""
    # A threshold nothing exceeds: the small model writes everything, and its entropies are read on the way.
    arm = Arm("calibration", "entropy_adaptive", {"threshold": 64.0, "window": setting.window})
    result = await run_arm(pool, prompts.calibration, arm, max_tokens=prompts.max_tokens)
    means: list[float] = []
    for outcome in result.outcomes:  # quantiles of what the rule looks at, at the places where it may act
        recent: deque[float] = deque(maxlen=setting.window)
        for place, token in enumerate(outcome.tokens, start=1):
            assert token.entropy_bits is not None
            recent.append(token.entropy_bits)
            if place >= setting.small_stay:
                means.append(sum(recent) / len(recent))
    return [round(float(value), 4) for value in np.quantile(means, quantiles)]


def matched(adaptive: ArmResult, setting: Setting, like: ArmResult | None = None) -> Arm:
    """Random switching that starts as the adaptive arm does, with its share of large tokens and its mean run length.

    With a given start an answer that ends after few runs has another share than the one asked for, so that one is
    found which gives the adaptive arm's on answers of given lengths.

    Args:
        adaptive: the arm.
        setting: its window and stays.
        like: whose answers' lengths are taken; None: the adaptive arm's own.
    """
    lengths = [outcome.usage.completion_tokens for outcome in (like or adaptive).outcomes]
    low, high = LEAST_SHARE, 1.0 - LEAST_SHARE
    target = min(max(adaptive.large_share, low), high)
    for _ in range(HALVINGS):
        tried = (low + high) / 2
        given = expected_share(random_params(tried, adaptive.mean_run, setting), lengths)
        low, high = (tried, high) if given < target else (low, tried)
    params = random_params((low + high) / 2, adaptive.mean_run, setting)
    return Arm(f"random for {adaptive.arm.name}", "random_switch", params)


def random_params(share: float, mean_run: float, setting: Setting) -> dict[str, Any]:
    """Parameters of `random_switch` for a share and a mean run length, in tokens.

    Answers are short and their last run is cut, so measured runs can be shorter than the minimum stay; the
    baseline's minimum stay is lowered to what its mean run lengths allow.
    """
    shortest = 2.0 * min(share, 1.0 - share) * mean_run
    mean_run = max(mean_run, mean_run / shortest) if shortest < 1.0 else mean_run
    least = max(1, min(setting.min_stay, int(shortest)))
    return {"share": share, "mean_run": mean_run, "min_stay": least, "start": setting.start}


def expected_share(params: dict[str, Any], lengths: Sequence[int]) -> float:
    """Share of large tokens that `random_switch` gives on answers of the given lengths, by running its rule."""
    large = 0
    for seed, length in enumerate(lengths):
        rule = RandomRunSwitch(**params, seed=seed, position=0)
        for _ in range(length):
            large += rule.active == "large"
            rule.observe(0, Readout())
    return large / max(sum(lengths), 1)


def random_line(results: Sequence[ArmResult], random: ArmResult, share: float) -> np.ndarray:
    """Per-problem accuracy of random switching at exactly `share`.

    The matched random arm's own share differs a little from what was asked for; it is moved to `share` along the
    straight line from small alone to large alone, per problem.
    """
    small = next(result for result in results if result.arm.name == "small only")
    large = next(result for result in results if result.arm.name == "large only")
    slope = float(large.correct.mean() - small.correct.mean())
    return random.correct + slope * (share - random.large_share)
