"""Look-ahead programs next to greedy decoding of the same model, and to entropy switching of the same FLOPs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from benchmarks.answers.figures import at_cost, difference, numbers, written
from benchmarks.answers.prompts import TASKS, asked, others, question
from benchmarks.answers.trained import POOL
from benchmarks.harness import Report, note, signed
from benchmarks.pieces import Section, Values
from benchmarks.strategies import Arm, ArmResult, run_arm
from benchmarks.switching_arms import SETTINGS, Prompts, calibrate
from benchmarks.verdicts import sentences
from experiments.stats.intervals import Floats, Interval, mean_score
from pool.local_pool import LocalPool
from turnout.config import TurnoutConfig

MAX_TOKENS = 160
AT_ONCE = 16
TEMPERATURE = 0.8  # of programs that draw, which would be greedy decoding at 0
QUANTILES = (0.35, 0.62, 0.86)
ROLES = ("small", "large")
SWITCHING = "each"  # setting of entropy_adaptive: the default's
A_STAR = {"scorer": "reward_model", "max_search_tokens": 1024}
# Methods with parameters that are not the default's, and their temperature.
PROGRAMS: dict[str, tuple[dict[str, Any], float]] = {
    "cntp": ({}, TEMPERATURE),
    "phi_decoding": ({}, TEMPERATURE),
    "look_back": ({}, 0.0),
    "adadec": ({}, 0.0),
    "ips": ({}, 0.0),
    "a_star": (A_STAR, TEMPERATURE),
    "best_of": ({"k": 4}, TEMPERATURE),
}


def arms() -> list[Arm]:
    """The programs on each model."""
    return [
        Arm(f"{method}, {role}", method, {"model": role, **params}, temperature)
        for role in ROLES
        for method, (params, temperature) in PROGRAMS.items()
    ]


def row(result: ArmResult) -> Values:
    """Plain figures of an arm, per prompt."""
    count = len(result.outcomes)
    written_tokens = sum(meter.written_tokens for outcome in result.outcomes for meter in outcome.usage.models.values())
    return {
        "arm": result.arm.name,
        "right": written(result.correct),
        "tokens": written_tokens / count,
        "flops": result.flops / count,
    }


async def compare(
    pool: LocalPool, prompts: Prompts, programs: list[Arm], most_tokens: int = MAX_TOKENS
) -> list[Values]:
    """Rows of the models alone, of entropy switching at several thresholds, and of the programs."""
    alone = [Arm(f"greedy, {role}", "plain", {"model": role}) for role in ROLES]
    setting = SETTINGS[SWITCHING]
    thresholds = sorted(set(await calibrate(pool, setting, prompts, QUANTILES)))
    switching = [
        Arm(f"entropy_adaptive {threshold:g}", "entropy_adaptive", {**setting.params, "threshold": threshold})
        for threshold in thresholds
    ]
    rows = []
    for arm in (*alone, *switching, *programs):
        note(f"{prompts.title}: {arm.name}")
        rows.append(row(await run_arm(pool, prompts.asked, arm, AT_ONCE, prompts.max_tokens)))
    return rows


async def measure(name: str, options: Namespace) -> Values:
    """One task: the models alone, entropy switching, and every program on each model."""
    task = name.removeprefix("look-ahead-")
    questions = [question(task, problem) for problem in asked(task, options.looked)]
    calibration = [question(task, problem) for problem in others(task, options.tuning)]
    pool = LocalPool.load(POOL, TurnoutConfig.demo())
    try:
        rows = await compare(pool, Prompts(task, questions, calibration, MAX_TOKENS), arms())
    finally:
        await pool.close()
    return {"prompts": len(questions), "rows": rows}


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """A table for each task, and what helps."""
    report.text(
        "The programs run on either demo model, with their default parameters, but for a_star, whose scorer is the"
        f" shipped reward model. Those that draw do so at temperature {TEMPERATURE:g}, where greedy decoding is what"
        " they are compared with all the same; `best_of` with four samples and majority stands for spending without"
        " looking ahead. Tokens are those written for a prompt, discarded ones included; FLOPs (2 x parameters x"
        " processed tokens) are relative to greedy decoding with the large model. *Less switching's*: accuracy less"
        " that of `entropy_adaptive` at the same FLOPs, on the straight line between its thresholds, the models alone"
        " included; what costs more than all of these is compared with the dearest. Differences are means over prompts"
        " with paired 95% bootstrap intervals."
    )
    for name, values in pieces.items():
        report.text(f"**{name.removeprefix('look-ahead-').capitalize()}**, {values['prompts']} held-out prompts:")
        _task(report, values)


def _task(report: Report, values: Values) -> None:
    rows = values["rows"]
    right = {each["arm"]: numbers(each["right"]) for each in rows}
    whole = next(each["flops"] for each in rows if each["arm"] == "greedy, large")
    compared = [each for each in rows if each["arm"].startswith(("greedy", "entropy_adaptive"))]
    curve = [(each["flops"], right[each["arm"]]) for each in compared]
    above_greedy: dict[str, dict[str, Interval]] = {}
    above_switching: dict[str, dict[str, Interval]] = {}
    lines = []
    for each in rows:
        greedy = switching = None
        if each not in compared:
            method, role = each["arm"].split(", ")
            greedy = difference(right[each["arm"]], right[f"greedy, {role}"])
            switching = difference(right[each["arm"]], at_cost(curve, each["flops"]))
            above_greedy.setdefault(method, {})[role] = greedy
            above_switching.setdefault(method, {})[role] = switching
        lines.append(_line(each, right[each["arm"]], whole, greedy, switching))
    columns = {
        "arm": lambda line: line["arm"],
        "accuracy": lambda line: line["accuracy"],
        "tokens": lambda line: f"{line['tokens']:.0f}",
        "FLOPs": lambda line: f"{line['flops']:.2f}",
        "less greedy's": lambda line: line["greedy"] and signed(line["greedy"]),
        "less switching's": lambda line: line["switching"] and signed(line["switching"]),
    }
    report.table(None, lines, columns)
    report.text(sentences("greedy decoding of the same model", above_greedy))
    report.text(sentences("entropy switching of the same FLOPs", above_switching))


def _line(
    each: Mapping[str, Any], right: Floats, whole: float, greedy: Interval | None, switching: Interval | None
) -> dict[str, Any]:
    line = {"arm": each["arm"], "accuracy": mean_score(right), "tokens": each["tokens"]}
    return line | {"flops": each["flops"] / whole, "greedy": greedy, "switching": switching}


SECTION = Section(
    "Look-ahead",
    tuple(f"look-ahead-{task}" for task in TASKS),
    measure,
    lambda options: {each: getattr(options, each) for each in ("looked", "tuning")},
    write,
)
