"""Speculation by drafter and kind of text, with the default length policy, over plain decoding.

A piece for each kind of text and number of prompts at once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Report, Side, Turns, note, shown, take_turns
from benchmarks.pieces import Section, Values
from benchmarks.strategies import Arm, ArmResult, run_arm
from experiments import real_model
from experiments.grid.contenders import contenders, lacking
from experiments.pairs import REAL, open_pair
from experiments.stats.intervals import Interval
from pool.local_pool import LocalPool
from training.calibration_data import Question
from training.data import real_text
from turnout.config import TurnoutConfig
from turnout.errors import TurnoutError

PLAIN, DEFAULT = "plain", "default"
# Those that need nothing trained for the target; the last two, its draft model.
DRAFTERS = ("copyspec", "input_copy", "token_recycling", "lookahead", "aded", "swift")
OF_DRAFT = ("model_chain", "model_tree")
AT_ONCE = (1, 8)
NAMES = {f"speculation-{kind}-{number}": (kind, number) for number in AT_ONCE for kind in real_text.KINDS}
LEAST = 0.97  # of plain decoding, which the default is to keep on every kind of text


def config() -> tuple[TurnoutConfig, tuple[str, ...]]:
    """The pair and all drafters, or without a draft the model alone and those that need none."""
    try:
        return open_pair(REAL).config, (*DRAFTERS, *OF_DRAFT)
    except TurnoutError as error:
        note(error.message)
        return real_model.alone(), DRAFTERS


def arms(pool: LocalPool, names: Sequence[str]) -> tuple[list[Arm], dict[str, str]]:
    """Plain decoding, the default, and each drafter that runs on the pool; by name, why others do not."""
    found = [Arm(PLAIN, "plain", {"model": "large"}), Arm(DEFAULT, "speculative")]
    missing = {}
    for name in names:
        contender = contenders()[name]
        why = lacking(contender, pool.model_pool)
        if why is None:  # a contender's length is fixed: without it, a request gets the default policy
            params = {key: value for key, value in (contender.params or {}).items() if key != "length"}
            found.append(Arm(name, "speculative", params))
        else:
            missing[name] = why
    return found, missing


async def measure(name: str, options: Namespace) -> Values:
    """All ways in turn on one kind of text."""
    kind, number = NAMES[name]
    asked = [Question(text, lambda _: 0.0) for text in real_text.prompts(kind)[: options.each]]
    chosen, drafters = config()
    pool = LocalPool.load(next(iter(chosen.pools)), chosen)
    try:
        ways, missing = arms(pool, drafters)

        def side(arm: Arm) -> Side[ArmResult]:
            return Side(arm.name, lambda _: run_arm(pool, asked, arm, number, options.tokens))

        turns = await take_turns([side(arm) for arm in ways], options.rounds, may_fail=(TurnoutError,))
    finally:
        await pool.close()
    return {
        "rounds": options.rounds,
        "tokens": options.tokens,
        "missing": missing | dict(turns.failures),
        "ways": {way: figures(turns, way) for way in turns.readings},
    }


def figures(turns: Turns[ArmResult], way: str) -> dict[str, Any]:
    """Speeds of each round, their ratio to plain decoding, and what was drafted."""
    last, plain = turns.readings[way][-1], turns.readings[PLAIN][-1]
    usages = [each.usage for each in last.outcomes]
    drafted = sum(each.speculation.draft_tokens for each in usages)
    rounds = sum(each.speculation.rounds for each in usages)
    written = sum(each.completion_tokens for each in usages)
    ratio = turns.ratio(way, PLAIN, _speed)
    return {
        "tokens_per_s": [_speed(each) for each in turns.readings[way]],
        "ratio": [ratio.value, ratio.low, ratio.high],
        "drafted": drafted / written,
        "accepted": sum(each.speculation.accepted_tokens for each in usages) / drafted if drafted else None,
        "rounds": rounds,
        "equal": sum(mine.text == theirs.text for mine, theirs in zip(last.outcomes, plain.outcomes, strict=True)),
        "answers": len(usages),
    }


def _speed(result: ArmResult) -> float:
    return sum(each.usage.completion_tokens for each in result.outcomes) / result.wall_s


def write(report: Report, pieces: Mapping[str, Values]) -> None:
    """A table for each number of prompts at once, a way a row; then the default against its goal."""
    first = next(iter(pieces.values()))
    report.text(
        f"bfloat16, greedy, at most {first['tokens']} tokens; tokens per second over those of plain decoding, medians"
        f" of {first['rounds']} alternating rounds [smallest, largest], and in brackets drafted tokens per token"
        " written and the share of them accepted. `default` is `speculative` without parameters; a drafter has the"
        f" default length policy. {LEAST:g} is to be kept by the default on every kind of text."
    )
    for number in AT_ONCE:
        kinds = {kind: pieces[name] for name, (kind, at_once) in NAMES.items() if at_once == number and name in pieces}
        if not kinds:
            continue
        ways = list(dict.fromkeys(way for values in kinds.values() for way in values["ways"] if way != PLAIN))
        rows = [
            {"way": way, **{kind: _cell(values["ways"].get(way)) for kind, values in kinds.items()}} for way in ways
        ]
        columns = {key: _column(key) for key in ("way", *kinds)}
        report.text(f"{number} at once:" if number > 1 else "One prompt at a time:")
        report.table(None, rows, columns)
        low = {kind: values["ways"][DEFAULT]["ratio"][0] for kind, values in kinds.items() if DEFAULT in values["ways"]}
        below = [f"{kind} {ratio:.2f}" for kind, ratio in low.items() if ratio < LEAST]
        report.text(f"The default: {'below ' + format(LEAST, 'g') + ': ' + ', '.join(below) if below else 'met'}.")
    differ = {
        f"{way} ({name})": f"{each['answers'] - each['equal']} of {each['answers']}"
        for name, values in pieces.items()
        for way, each in values["ways"].items()
        if each["equal"] < each["answers"]
    }
    if differ:
        report.text(
            "Answers that are not plain decoding's word for word, as bfloat16 rounds otherwise in another shape: "
            + ", ".join(f"{way} {count}" for way, count in differ.items())
            + "."
        )
    missing = {way: why for values in pieces.values() for way, why in values["missing"].items()}
    if missing:
        report.text("Did not run: " + "; ".join(f"{way}: {why}" for way, why in missing.items()) + ".")


def _column(key: str) -> Any:
    return lambda row: row[key]


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    accepted = "" if found["accepted"] is None else f", {found['accepted']:.0%}"
    return f"{shown(Interval(*found['ratio']), 2)} ({found['drafted']:.1f}{accepted})"


SECTION = Section(
    "Speculation by kind of text",
    tuple(NAMES),
    measure,
    lambda options: {"rounds": options.rounds, "tokens": options.tokens, "each": options.each},
    write,
)
