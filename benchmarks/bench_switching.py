"""Entropy switching beside the large model alone, in requests per second, at 8 and 32 concurrent requests.

All ways of answering take turns on the same held-out problems, and each round gives one ratio. Once with the demo pair
as it is, and once with a deepened large model: layers that write nothing make it dearer and leave every answer as it
was, as if a small model stood beside one of at least ten times its cost. Thresholds come from other problems.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.arms import Arm, ArmResult, run_arm
from benchmarks.deepened import deepened
from benchmarks.harness import note, publish
from benchmarks.retention import GOALS, judged, percent
from benchmarks.switching_arms import SETTINGS, TEST_SEED, Setting, arithmetic, calibrate
from engine.pool import LocalPool
from experiments.machine import describe, one_line
from experiments.statistics import Interval, spread
from experiments.stats.intervals import ratio as accuracy_ratio
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from training.data.problem import Problem
from turnout.config import DEMO_METHOD, TurnoutConfig, model_path

RESULT = Path("docs/results/switching.md")
CONCURRENT = (8, 32)
ROUNDS = 7
PROBLEMS, CALIBRATION = 128, 100
EXTRA_LAYERS = 144  # enough for ten times the small model's time, which the page tells as measured
KV_BYTES = 1 << 30  # the layers that were added keep keys and values too
QUANTILE = 0.7  # of the small model's entropies: where the large model wrote 25 to 45% of the tokens in `ead.md`
GOAL, BAND, COST = 1.3, (0.25, 0.45), 10.0
FLOOR = GOALS[0].least  # of the large model's accuracy: what seed 2 keeps at the lower end of the band
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
    """The demo pair in a number format, its large model deepened by so many layers in a folder; 0: as it is shipped."""
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
    """Every way in turn, in an order that rotates; one round is thrown away."""
    note(f"{pair}, {concurrent} at once")
    kept: list[dict[str, ArmResult]] = []
    for number in range(rounds + 1):
        start = number % len(chosen)
        kept.append(
            {arm.name: await run_arm(pool, problems, arm, concurrent) for arm in chosen[start:] + chosen[:start]}
        )
    return [_speed(pair, concurrent, arm, kept[1:]) for arm in chosen]


def _speed(pair: str, concurrent: int, arm: Arm, rounds: list[dict[str, ArmResult]]) -> Speed:
    mine, large = ([each[name] for each in rounds] for name in (arm.name, LARGE.name))
    outcomes = mine[-1].outcomes
    return Speed(
        pair,
        concurrent,
        arm.name,
        arm.method != "plain",
        spread([len(each.outcomes) / each.wall_s for each in mine]),
        spread([theirs.wall_s / each.wall_s for each, theirs in zip(mine, large, strict=True)]),
        mine[-1].large_share,
        accuracy_ratio(mine[-1].correct, large[-1].correct),
        sum(each.usage.completion_tokens for each in outcomes) / len(outcomes),
    )


async def measure(
    pairs: list[Pair], counts: tuple[int, int], concurrencies: tuple[int, ...], rounds: int
) -> list[Speed]:
    """All pairs at all concurrencies; `counts`: problems of a turn, and for a threshold."""
    speeds = []
    for pair in pairs:
        note(f"{pair.title}: loading")
        pool = LocalPool.load("demo", pair.config)
        try:
            chosen = await arms(pool, counts[1])
            problems = heldout(MIDDLE_DIFFICULTY, counts[0], seed=TEST_SEED)
            for concurrent in concurrencies:
                speeds += await compare(pair.title, pool, chosen, problems, concurrent, rounds)
        finally:
            await pool.close()
    return speeds


def to_markdown(speeds: list[Speed], rounds: int, problems: int, machine: dict[str, str]) -> str:
    """The page, verdicts first."""
    low, high = BAND
    lines = [
        "# Entropy switching beside the large model alone, under load",
        "",
        f"`make bench-switching`; {one_line(machine)}. {problems} held-out problems of arithmetic a turn, greedy, so"
        f" many answered at once; medians of {rounds} alternating rounds [smallest, largest]. Thresholds are the"
        f" quantile {QUANTILE:g} of the small model's rolling mean entropy on other problems. Accuracy with its 95%"
        " interval over problems drawn again.",
        "",
        "A deepened large model has layers whose output projections are zero: they are computed, and change no answer."
        " Cost: how many times longer the large model alone takes for all requests than the small one alone. Large"
        " tokens are all that the large model wrote, dropped ones included, per token of the answers.",
        "",
        f"## Goal: {GOAL:g} times the large model's requests per second, where it writes {low:.0%} to {high:.0%} of the"
        f" tokens, costs at least {COST:g} times the small one, and {FLOOR:.1%} of its accuracy are kept",
        "",
    ]
    places = dict.fromkeys((each.pair, each.concurrent) for each in speeds)
    lines += [verdict([each for each in speeds if (each.pair, each.concurrent) == place]) for place in places]
    lines += [
        "",
        "| pair | at once | way | requests/s | of the large model's | large tokens | accuracy, of large"
        " | tokens a request |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in speeds:
        lines.append(
            f"| {each.pair} | {each.concurrent} | {each.name} | {_short(each.per_s, 1)} | {_short(each.ratio, 2)}"
            f" | {each.large_share:.1%} | {percent(each.kept)} | {each.mean_tokens:.1f} |"
        )
    return "\n".join([*lines, ""])


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
    goal = judged(best.ratio, GOAL, "{:g}")
    if not good:
        goal = f"goal at least {GOAL:g}: missed, for none of them keeps {FLOOR:.1%} of the accuracy"
    if cost.value < COST:
        goal += f", though the goal is for a large model of at least {COST:g} times the small one's cost"
    return (
        f"{where}, cost {_short(cost, 1)}: {_short(best.ratio, 2)} times, by {best.name} with {best.large_share:.1%}"
        f" large tokens and {percent(best.kept)} of the accuracy; {goal}."
    )


def _short(interval: Interval, digits: int) -> str:
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def main(
    extras: list[int],
    dtypes: list[str],
    concurrencies: tuple[int, ...],
    counts: tuple[int, int],
    rounds: int,
    device: str,
    out: Path | None,
) -> None:
    """Measure, print, and save where there is a place for it."""
    machine = describe(device)
    with tempfile.TemporaryDirectory(prefix="switching-") as folder:
        pairs = [pair_of(extra, Path(folder), dtype, device) for extra in extras for dtype in dtypes]
        speeds = uvloop.run(measure(pairs, counts, concurrencies, rounds))
    text = to_markdown(speeds, rounds, counts[0], machine)
    publish(text, out, {"machine": machine, "rounds": rounds, "speeds": [asdict(each) for each in speeds]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
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
    parser.add_argument("--concurrent", type=int, nargs="+", default=list(CONCURRENT))
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="of each turn")
    parser.add_argument("--calibration", type=int, default=CALIBRATION, help="problems for a threshold")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cpu", help="where both models live, as torch names it")
    parser.add_argument("--quick", action="store_true", help="one round, few problems, results printed and not saved")
    parser.add_argument("--out", type=Path, help=f"absent: {RESULT}, nowhere with --quick")
    asked = parser.parse_args()
    if asked.quick:
        main(asked.deepen, asked.dtypes, tuple(asked.concurrent), (32, 24), 1, asked.device, asked.out)
    else:
        sizes = (asked.problems, asked.calibration)
        out = asked.out or (
            RESULT if asked.device == "cpu" else RESULT.with_stem(f"{RESULT.stem}-{asked.device}".replace(":", "-"))
        )
        main(asked.deepen, asked.dtypes, tuple(asked.concurrent), sizes, asked.rounds, asked.device, out)
