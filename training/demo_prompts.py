"""What models are asked where something is trained on their answers: the demo's kinds of text, or lines of a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pool.text import TextTokenizer
from training.data import arithmetic, edits, lists, passages, templates
from training.data.python_sources import read_sources
from turnout.calls import ChatMessage

PYTHON = "python"
# As many of each as their texts are worth to a drafter; all that the demo models were taught is among them.
SHARES = {"arithmetic": 0.3, "edits": 0.2, "passages": 0.12, "templates": 0.12, "lists": 0.08, PYTHON: 0.18}
_KINDS = {"arithmetic": arithmetic, "edits": edits, "passages": passages, "templates": templates, "lists": lists}
_HELDOUT_SEED = 21
OPENING_CHARACTERS = 400  # about 128 tokens of the demo's tokenizer


@dataclass(frozen=True)
class Prompt:
    """A text that a model continues.

    Attributes:
        text: what it reads.
        is_chat: whether that is a user's message, to be answered; else the beginning of a text, to be continued.
    """

    text: str
    is_chat: bool = True

    def encode(self, tokenizer: TextTokenizer) -> list[int]:
        """Its token ids, for a chat with the template's."""
        if self.is_chat:
            return tokenizer.encode_chat([ChatMessage("user", self.text)])
        return tokenizer.encode(self.text)


def read_lines(path: Path, count: int) -> list[Prompt]:
    """The first lines of a text file that are not empty, as questions."""
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    return [Prompt(line) for line in lines[:count]]


def training_prompts(count: int, seed: str, shares: dict[str, float] | None = None) -> list[Prompt]:
    """Prompts of the kinds that the demo models were taught, none of them held out.

    Args:
        count: how many.
        seed: the same one gives the same prompts.
        shares: of the kinds; absent: `SHARES`.
    """
    rng = random.Random(seed)
    chances = SHARES if shares is None else shares
    kinds = rng.choices(list(chances), list(chances.values()), k=count)
    modules = _Modules(read_sources()) if PYTHON in kinds else None
    return [_drawn(rng, kind, modules) for kind in kinds]


def heldout_prompts(count: int) -> list[Prompt]:
    """Make about `count` prompts of the same kinds that no training sees; the same count gives the same prompts."""
    found = []
    for kind, source in _KINDS.items():
        each = max(1, round(count * SHARES[kind] / len(source.DIFFICULTIES)))
        problems = [problem for grade in source.DIFFICULTIES for problem in source.heldout(grade, each, _HELDOUT_SEED)]
        found += [Prompt(problem.prompt) for problem in problems]
    rng, modules = random.Random(f"openings-{_HELDOUT_SEED}"), _Modules(read_sources(heldout=True))
    return found + [_drawn(rng, PYTHON, modules) for _ in range(round(count * SHARES[PYTHON]))]


class _Modules:
    """Python modules, each as likely as it is long."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = [text for text in texts if len(text) > 2 * OPENING_CHARACTERS]
        self._ends = list(accumulate(map(len, self._texts)))

    def opening(self, rng: random.Random) -> str:
        """A piece of one from the beginning of a line, with something left of the module behind it."""
        text = rng.choices(self._texts, cum_weights=self._ends)[0]
        start = text.rfind("\n", 0, rng.randrange(len(text) - 2 * OPENING_CHARACTERS)) + 1
        return text[start : start + OPENING_CHARACTERS]


def _drawn(rng: random.Random, kind: str, modules: _Modules | None) -> Prompt:
    if kind == PYTHON and modules is not None:
        return Prompt(modules.opening(rng), is_chat=False)
    source = _KINDS[kind]
    return Prompt(source.draw_training(rng, rng.choice(source.DIFFICULTIES)).prompt)
