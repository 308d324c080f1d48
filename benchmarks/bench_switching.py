"""Entropy switching and the large model alone, in requests per second, at 8 and 32 concurrent requests.

All ways of answering take turns on the same held-out problems, and each round gives one ratio. Once with the demo pair
as it is, and once with a deepened large model: layers that write nothing make it dearer and leave every answer as it
was, as if a small model were paired with one of at least ten times its cost. Thresholds come from other problems.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.harness import Goal, Report, Side, Turns, command_line, note, run, shown, take_turns
from benchmarks.retention import RETENTIONS, judged, percent
from benchmarks.slow_model import deepened
from benchmarks.strategies import Arm, ArmResult, run_arm
from benchmarks.switching_arms import ARITHMETIC, SETTINGS, TEST_SEED, Setting, arithmetic, calibrate
from experiments.stats.intervals import Interval
from experiments.stats.intervals import ratio as accuracy_ratio
from pool.local_pool import LocalPool
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from training.data.problem import Problem
from turnout.config import DEMO_METHOD, TurnoutConfig, model_path

EXTRA_LAYERS = 144  # enough for ten times the small model's time, which the page tells as measured
KV_BYTES = 1 << 30  # the layers that were added keep keys and values too
QUANTILE = 0.7  # of the small model's entropies: where the large model wrote 25 to 45% of the tokens in `ead.md`
GOAL, BAND, COST = 1.3, (0.25, 0.45), 10.0
FLOOR = RETENTIONS[0].least  # of the large model's accuracy: what paper #2 keeps at the lower end of the band
# Float32 reads twice as much; a processor without instructions for bfloat16 may compute the faster in it.
DTYPES = ("bfloat16", "float32")
SMALL, LARGE = (Arm(f"{role} alone", "plain", {"model": role}) for role in ("small", "large"))


@dataclass(frozen=True, slots=True)
class Pair:
    """Models that are measured: their name for the report, and the configuration of the pool `demo`."""

    title: str
    config: TurnoutConfig


@dataclass(frozen=True, slots=True)
class Speed:
    """One way of answering.

    Attributes:
        per_s: requests per second, median of the rounds with the smallest and the largest.
        ratio: to the large model alone, of each round.
        large_share: tokens written by the large model, dropped ones included, per token of the answers.
        kept: accuracy relative to the large model alone, with its 95% interval over problems drawn again.
        mean_tokens: of an answer.
    """

    pair: str
    concurrent: int
    name: str
    switches: bool
    per_s: Interval
    ratio: Interval
    large_share: float
    kept: Interval
    mean_tokens: float


def pair_of(extra: int, folder: Path, dtype: str = DTYPES[0], device: str = "cpu") -> Pair:
    """The demo pair in a number format, its large model deepened by `extra` layers in a folder; 0: as it is shipped."""
    config = TurnoutConfig.demo()
    place = {"dtype": dtype, "device": device}
    models = {name: model.model_copy(update=place) for name, model in config.models.items()}
    if not extra:
        return Pair(f"as shipped, {dtype}", config.model_copy(update={"models": models}))
    name = config.pools["demo"].large
    made = deepened(model_path(config.models[name]), folder / f"deepened-{extra}", extra)
    models[name] = models[name].model_copy(update={"path": str(made), "kv_memory_bytes": KV_BYTES})
    return Pair(f"large model deepened by {extra} layers, {dtype}", config.model_copy(update={"models": models}))


async def arms(pool: LocalPool, calibration: int) -> list[Arm]:
    """Both models alone, the shipped default, and each setting of `bench_ead` at a threshold of its own."""
    found = [LARGE, SMALL, Arm("the demo's default", DEMO_METHOD.name, DEMO_METHOD.params)]
    for setting in SETTINGS.values():
        [threshold] = await calibrate(pool, setting, arithmetic(1, calibration), (QUANTILE,))
        found.append(Arm(_words(setting, threshold), "entropy_adaptive", {"threshold": threshold, **setting.params}))
    return found


def _words(setting: Setting, threshold: float) -> str:
    return f"window {setting.window}, stay {setting.stay}, {setting.effect}, threshold {threshold:g}"


async def compare(
    pair: str, pool: LocalPool, chosen: list[Arm], problems: list[Problem], concurrent: int, rounds: int
) -> list[Speed]:
    """Every way in turn."""
    note(f"{pair}, {concurrent} at once")
    turns = await take_turns([_side(pool, arm, problems, concurrent) for arm in chosen], rounds)
    return [_speed(pair, concurrent, arm, turns) for arm in chosen]


def _side(pool: LocalPool, arm: Arm, problems: list[Problem], concurrent: int) -> Side[ArmResult]:
    return Side(arm.name, lambda _: run_arm(pool, problems, arm, concurrent))


def _speed(pair: str, concurrent: int, arm: Arm, turns: Turns[ArmResult]) -> Speed:
    mine, large = (turns.readings[name][-1] for name in (arm.name, LARGE.name))
    return Speed(
        pair,
        concurrent,
        arm.name,
        arm.method != "plain",
        turns.spread(arm.name, lambda each: len(each.outcomes) / each.wall_s),
        turns.ratio(LARGE.name, arm.name, lambda each: each.wall_s),
        mine.large_share,
        accuracy_ratio(mine.correct, large.correct),
        sum(each.usage.completion_tokens for each in mine.outcomes) / len(mine.outcomes),
    )


async def speeds_of(options: argparse.Namespace) -> list[Speed]:
    """All pairs at all concurrencies."""
    speeds = []
    with tempfile.TemporaryDirectory(prefix="switching-") as folder:
        for extra, dtype in product(options.deepen, options.dtypes):
            pair = pair_of(extra, Path(folder), dtype, options.device)
            note(f"{pair.title}: loading")
            pool = LocalPool.load("demo", pair.config)
            try:
                chosen = await arms(pool, options.calibration)
                problems = heldout(MIDDLE_DIFFICULTY, options.problems, seed=TEST_SEED)
                for concurrent in options.concurrent:
                    speeds += await compare(pair.title, pool, chosen, problems, concurrent, options.rounds)
            finally:
                await pool.close()
    return speeds


def page(speeds: list[Speed], rounds: int, problems: int, device: str = "cpu") -> Report:
    """The page, verdicts first."""
    low, high = BAND
    report = Report(
        "Entropy switching and the large model alone, under load",
        f"`make bench-switching`; {problems} held-out problems of arithmetic a turn, greedy, answered at once as the"
        f" table says; medians of {rounds} alternating rounds [smallest, largest]. Thresholds are the quantile"
        f" {QUANTILE:g} of the small model's rolling mean entropy on other problems. Accuracy with its 95% interval"
        " over problems drawn again.",
        device,
    )
    report.text(
        "A deepened large model has layers whose output projections are zero: they are computed, and change no answer."
        " Cost: how many times longer the large model alone takes for all requests than the small one alone. Large"
        " tokens are all that the large model wrote, dropped ones included, per token of the answers."
    )
    report.section(
        f"Goal: {GOAL:g} times the large model's requests per second, where it writes {low:.0%} to {high:.0%} of the"
        f" tokens, costs at least {COST:g} times the small one, and {FLOOR:.1%} of its accuracy are kept"
    )
    places = dict.fromkeys((each.pair, each.concurrent) for each in speeds)
    report.text(
        "\n".join(verdict([each for each in speeds if (each.pair, each.concurrent) == place]) for place in places)
    )
    columns = {
        "pair": lambda each: each.pair,
        "at once": lambda each: each.concurrent,
        "way": lambda each: each.name,
        "requests/s": lambda each: shown(each.per_s, 1),
        "of the large model's": lambda each: shown(each.ratio, 2),
        "large tokens": lambda each: f"{each.large_share:.1%}",
        "accuracy, of large": lambda each: percent(each.kept),
        "tokens a request": lambda each: f"{each.mean_tokens:.1f}",
    }
    report.table("speeds", speeds, columns)
    return report


def verdict(speeds: list[Speed]) -> str:
    """One line about a pair at one concurrency: the fastest way with the goal's share of large tokens that is as good
    as `FLOOR` asks; where none is, the fastest, which misses the goal."""
    where = f"- {speeds[0].pair}, {speeds[0].concurrent} at once"
    cost = next(each.ratio for each in speeds if each.name == SMALL.name)
    inside = [each for each in speeds if each.switches and BAND[0] <= each.large_share <= BAND[1]]
    if not inside:
        shares = ", ".join(f"{each.large_share:.1%}" for each in speeds if each.switches)
        return f"{where}: not measured: the shares of large tokens were {shares}."
    good = [each for each in inside if each.kept.value >= FLOOR]
    best = max(good or inside, key=lambda each: each.ratio.value)
    goal = judged(best.ratio, Goal(GOAL), "{:g}")
    if not good:
        goal = f"goal at least {GOAL:g}: missed, for none of them keeps {FLOOR:.1%} of the accuracy"
    if cost.value < COST:
        goal += f", though the goal is for a large model of at least {COST:g} times the small one's cost"
    return (
        f"{where}, cost {shown(cost, 1)}: {shown(best.ratio, 2)} times, by {best.name} with {best.large_share:.1%}"
        f" large tokens and {percent(best.kept)} of the accuracy; {goal}."
    )


async def measure(options: argparse.Namespace) -> Report:
    """Measure and judge."""
    return page(await speeds_of(options), options.rounds, options.problems, options.device)


if __name__ == "__main__":
    parser = command_line(
        __doc__, Path("docs/results/switching.md"), rounds=7, demo_only=ARITHMETIC, problems=32, calibration=24
    )
    parser.add_argument(
        "--deepen",
        type=int,
        nargs="+",
        default=[0, EXTRA_LAYERS],
        metavar="LAYERS",
        help="layers that write nothing, added to the large model, one pair for each; 0: as shipped",
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="number formats, one pair for each"
    )
    parser.add_argument("--concurrent", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--problems", type=int, default=128, help="of each turn")
    parser.add_argument("--calibration", type=int, default=100, help="problems for a threshold")
    parser.add_argument("--device", default="cpu", help="where both models live, as torch names it")
    run(parser, measure)
