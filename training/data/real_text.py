"""Prompts to models that people use, by kind of text; nothing is trained on them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

# Those by which speculation is compared, and those in scripts other than Latin.
KINDS = ("question", "code", "edit", "summary")
SCRIPTS = "scripts"


@cache
def prompts(kind: str) -> tuple[str, ...]:
    """User messages of a kind: twelve of each in `KINDS`, two for each of five scripts."""
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(found[kind])
