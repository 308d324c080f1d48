"""Part of an answer's text that counts."""

from __future__ import annotations

import math
import re

from training.data.problem import final_answer

# A sign belongs to a number unless something that counts stands right before it, and a comma where thousands do.
NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def final(text: str) -> str:
    """The line after the last answer mark; the whole text where there is none."""
    marked = final_answer(text)
    return text.strip() if marked is None else marked


def number(text: str) -> float | None:
    """A number, its thousands with commas or without; None where it is none."""
    found = NUMBER.fullmatch(text.strip().removesuffix("."))
    value = float(found[0].replace(",", "")) if found else math.nan
    return value if math.isfinite(value) else None


def last_number(text: str) -> float | None:
    """The last number of what counts."""
    found = NUMBER.findall(final(text))
    return number(found[-1]) if found else None
