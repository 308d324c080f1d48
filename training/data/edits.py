"""Edits of Python text whose answer repeats most of the question: copy, rename a name, remove a line."""

import random
import re
import textwrap
from collections.abc import Callable
from functools import cache
from keyword import kwlist

from training.data.problem import Problem
from training.data.python_sources import read_sources

DIFFICULTIES = (1, 2, 3, 4, 5)
MAX_CHARS = 480  # question and answer together stay within one training row
_NUM_LINES = {1: 3, 2: 5, 3: 8, 4: 11, 5: 14}
_MIN_CHARS_PER_LINE = 8
_NAME = re.compile(r"\b[a-z_][a-z_0-9]{2,14}\b")
_NEW_NAMES = (
    "total", "entry", "source", "target", "value", "record", "limit", "result", "buffer", "offset", "handle",
    "message", "options", "parent", "pattern", "queue", "reader", "section", "table", "writer", "window", "state",
)  # fmt: skip


@cache
def _modules(heldout: bool) -> tuple[tuple[str, ...], ...]:
    """Lines of every module that is long enough to cut from."""
    split = (tuple(text.expandtabs(4).splitlines()) for text in read_sources(heldout))
    return tuple(lines for lines in split if len(lines) > 2 * max(_NUM_LINES.values()))


def snippet(rng: random.Random, num_lines: int, heldout: bool) -> str:
    """`num_lines` consecutive lines of a module without their common indentation, fewer where they are too long."""
    while True:
        lines = rng.choice(_modules(heldout))
        start = rng.randrange(len(lines) - num_lines)
        text = textwrap.dedent("\n".join(lines[start : start + num_lines])).strip("\n")
        while len(text) > MAX_CHARS:
            text = text.rpartition("\n")[0]
        if len(text) >= _MIN_CHARS_PER_LINE * num_lines and text.isascii():
            return text


def _repeat(rng: random.Random, text: str) -> tuple[str, str] | None:
    return rng.choice(("Repeat this text.", "Copy this text.")), text


def _rename(rng: random.Random, text: str) -> tuple[str, str] | None:
    names = sorted(set(_NAME.findall(text)) - set(kwlist))
    if not names:
        return None
    old = rng.choice(names)
    new = rng.choice([name for name in _NEW_NAMES if name not in text] or ["renamed"])
    return f"Rename {old} to {new}.", re.sub(rf"\b{old}\b", new, text)


def _remove(rng: random.Random, text: str) -> tuple[str, str] | None:
    lines = text.split("\n")
    marked = [index for index, line in enumerate(lines) if line.strip() and lines.count(line) == 1]
    if len(lines) < 3 or not marked:
        return None
    index = rng.choice(marked)
    return f"Remove the line {lines[index].strip()}", "\n".join(lines[:index] + lines[index + 1 :])


_BUILDERS: dict[str, Callable[[random.Random, str], tuple[str, str] | None]] = {
    "repeat": _repeat,
    "rename": _rename,
    "remove": _remove,
}
TASKS = tuple(_BUILDERS)


def draw(rng: random.Random, difficulty: int, heldout: bool = False, task: str | None = None) -> Problem:
    """One edit of a piece of a training (or held-out) module; a random task unless one is named.

    Raises:
        ValueError: an unknown difficulty or task.
    """
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be one of {DIFFICULTIES}, got {difficulty}")
    name = task or rng.choice(TASKS)
    if name not in _BUILDERS:
        raise ValueError(f"task must be one of {TASKS}, got {name!r}")
    while True:
        text = snippet(rng, _NUM_LINES[difficulty], heldout)
        built = _BUILDERS[name](rng, text)
        if built is not None:
            order, answer = built
            return Problem(f"{order}\n{text}", answer, answer, difficulty, name, key=text)


def draw_training(rng: random.Random, difficulty: int) -> Problem:
    """One edit of a piece of a training module."""
    return draw(rng, difficulty)


def heldout(difficulty: int, count: int, seed: int = 0, task: str | None = None) -> list[Problem]:
    """`count` distinct edits of pieces of modules that training never sees; the same arguments give the same list."""
    rng = random.Random(f"edits-heldout-{seed}-{difficulty}-{task}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw(rng, difficulty, heldout=True, task=task)
        found.setdefault(problem.prompt, problem)
    return list(found.values())


def is_correct(problem: Problem, completion_text: str) -> bool:
    """Whether the completion is the edited text, but for blanks at its ends."""
    return completion_text.strip() == problem.result.strip()
