"""Held-out arithmetic as a data set: a question, its result, and its working among three with a mistake."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from training.data.problem import Problem

WRONG = 3
# By how much a step is wrong: what slips when digits are added and carried.
SLIPS = (-10, -2, -1, 1, 2, 10)
STEP = re.compile(r"([0-9]+)([-+*])([0-9]+)=([0-9]+)")


def write_problems(path: Path, count: int, seed: int = 0) -> None:
    """As JSON lines; the same arguments write the same file."""
    rng = random.Random(f"foreign-{seed}")
    lines = [json.dumps(_record(problem, rng)) for problem in heldout(MIDDLE_DIFFICULTY, count, seed)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _record(problem: Problem, rng: random.Random) -> dict[str, Any]:
    workings = {problem.answer}
    while len(workings) <= WRONG:
        workings.add(_mistaken(problem.answer, rng))
    shown = sorted(workings)
    rng.shuffle(shown)
    return {
        "question": problem.prompt,
        "result": problem.result,
        "workings": shown,
        "right": shown.index(problem.answer),
    }


def _mistaken(working: str, rng: random.Random) -> str:
    """The same steps with a slip in one of them, carried on to the end; itself, where that would be negative."""
    *steps, end = working.split("\n")
    at = rng.randrange(len(steps))
    values: dict[int, int] = {}  # by what they were before the slip
    lines = []
    for place, step in enumerate(steps):
        found = STEP.fullmatch(step)
        assert found is not None, step
        left, right, result = (int(found[group]) for group in (1, 3, 4))
        made = _applied(found[2], values.get(left, left), values.get(right, right))
        made += rng.choice(SLIPS) if place == at else 0
        lines.append(f"{values.get(left, left)}{found[2]}{values.get(right, right)}={made}")
        values[result] = made
    wrong = f"{end.rpartition(' ')[0]} {made}"
    return working if "=-" in "".join(lines) else "\n".join([*lines, wrong])


def _applied(operator: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]
