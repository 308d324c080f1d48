"""What counts of an answer's text."""

from __future__ import annotations

import math
import re

from training.data.problem import final_answer

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def final(text: str) -> str:
    """The line after the last answer mark; the whole text where there is none."""
    marked = final_answer(text)
    return text.strip() if marked is None else marked


def number(text: str) -> float | None:
    """A number with or without commas; None where it is none."""
    try:
        value = float(text.strip().replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def last_number(text: str) -> float | None:
    """The last number of what counts."""
    found = NUMBER.findall(final(text))
    return number(found[-1]) if found else None
