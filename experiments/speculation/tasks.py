"""Six kinds of text that differ in what a drafter can know of them, as prompts in token ids."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from pool.text import TextTokenizer
from training.data import arithmetic, edits, passages, templates
from training.data.problem import Problem
from training.data.python_sources import read_sources
from turnout.calls import ChatMessage

DIFFICULTY = 3
MOST_TOKENS = 512  # of prompt and answer together: what the demo models were trained on
OPENING_TOKENS = 128  # of a text that is to be continued
LEAST_CHARACTERS = 800  # that an opening has after it in its text, where it can
LEAST_AFTER = 32  # tokens a text must go on for after its opening
WARM_UP = 8
SEED = 17

Prompt = tuple[int, ...]
Heldout = Callable[[int, int, int], list[Problem]]


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Prompts of one kind, none of which a demo model was trained on.

    Attributes:
        name: of the kind.
        warm_up: prompts that are answered before anything is measured.
        prompts: those that are measured.
    """

    name: str
    warm_up: tuple[Prompt, ...]
    prompts: tuple[Prompt, ...]


def _problems(heldout: Heldout) -> Callable[[TextTokenizer, int, int], Iterator[Prompt]]:
    """Questions of a generator, as chats."""

    def prompts(tokenizer: TextTokenizer, count: int, room: int) -> Iterator[Prompt]:
        # Some are too long; there are enough others.
        for problem in heldout(DIFFICULTY, 2 * count, SEED):
            prompt = tuple(tokenizer.encode_chat((ChatMessage("user", problem.prompt),)))
            if len(prompt) <= room:
                yield prompt

    return prompts


def _continued(texts: Callable[[], tuple[str, ...]]) -> Callable[[TextTokenizer, int, int], Iterator[Prompt]]:
    """Openings of texts, from the beginning of a line, to be continued; each text in turn."""

    def prompts(tokenizer: TextTokenizer, count: int, room: int) -> Iterator[Prompt]:
        rng = random.Random(SEED)
        found = list(texts())
        rng.shuffle(found)
        seen: set[Prompt] = set()
        while found:
            left = []
            for text in found:
                lines = (at + 1 for at, char in enumerate(text[: -LEAST_CHARACTERS - 1]) if char == "\n")
                start = rng.choice([0, *lines])
                ids = tokenizer.encode(text[start : start + 4 * LEAST_CHARACTERS])
                prompt = tuple(ids[: min(OPENING_TOKENS, room)])
                if len(ids) >= len(prompt) + LEAST_AFTER and prompt not in seen:
                    seen.add(prompt)
                    left.append(text)
                    yield prompt
            found = left

    return prompts


@cache
def docstrings() -> tuple[str, ...]:
    """Prose of the held-out modules of the standard library: the docstrings of each, one after the other."""
    return tuple(text for text in map(_prose, read_sources(heldout=True)) if text)


def _prose(source: str) -> str:
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = [ast.get_docstring(node) for node in nodes]
    return "\n\n".join(text for text in found if text and ">>>" not in text)


@cache
def code() -> tuple[str, ...]:
    """The held-out modules of the standard library, without what stands before their first import."""
    sources = read_sources(heldout=True)
    return tuple(text[max(text.find("\nimport "), 0) :].lstrip("\n") for text in sources)


GROUPS: dict[str, Callable[[TextTokenizer, int, int], Iterator[Prompt]]] = {
    "edit": _problems(edits.heldout),
    "template": _problems(templates.heldout),
    "free text": _continued(docstrings),
    "code": _continued(code),
    "arithmetic": _problems(arithmetic.heldout),
    "passage": _problems(passages.heldout),
}


def task_group(name: str, tokenizer: TextTokenizer, count: int, max_tokens: int) -> TaskGroup:
    """The prompts of a group; more of them begin with the same ones.

    Args:
        name: one of `GROUPS`.
        tokenizer: of the models under measurement.
        count: prompts to measure; `WARM_UP` more are made.
        max_tokens: longest answer: prompt and answer stay within `MOST_TOKENS`.

    Raises:
        ValueError: the texts do not give that many.
    """
    wanted = WARM_UP + count
    made = GROUPS[name](tokenizer, wanted, MOST_TOKENS - max_tokens)
    prompts = tuple(prompt for prompt, _ in zip(made, range(wanted), strict=False))
    if len(prompts) < wanted:
        raise ValueError(f"{name}: {len(prompts) - WARM_UP} prompts at most, got {count}")
    return TaskGroup(name, prompts[:WARM_UP], prompts[WARM_UP:])
