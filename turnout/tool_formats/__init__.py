"""Tool formats: one module per format in this package, whose FORMAT is the format of its name.

A format says how calls of functions are written, and from that follow the grammar that holds a model to it
(`grammar.py`), the parser of what it writes (`parser.py`), and the text that describes it to a model whose chat
template has no place for tools. Nothing lists the formats a second time.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Container
from functools import cache

from turnout.tool_formats.base import MARKED, ToolFormat

PARTS = frozenset({"base", "grammar", "json_scanner", "parser", "schemas", "tagged"})
FALLBACK = "plain_json"


@cache
def tool_formats() -> dict[str, ToolFormat]:
    """Every format by name."""
    names = [each.name for each in pkgutil.iter_modules(__path__) if each.name not in PARTS]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in sorted(names)]
    return {each.FORMAT.name: each.FORMAT for each in modules}


@cache
def tool_format(name: str) -> ToolFormat:
    """Return a format by its name; "": the one that is used where no other is recognised.

    Raises:
        KeyError: there is none.
    """
    found = tool_formats()[name.removesuffix(MARKED) or FALLBACK]
    return found.marked if name.endswith(MARKED) else found


def recognised(template: str, vocabulary: Container[str]) -> ToolFormat:
    """Return the format that a model was taught, by its chat template, else by its vocabulary.

    Args:
        template: the chat template; may be empty.
        vocabulary: strings of the model's tokens.
    """
    for each in sorted(tool_formats().values(), key=lambda each: -sum(map(len, each.signs))):
        if each.signs and all(sign in template for sign in each.signs):
            return each
    for each in sorted(tool_formats().values(), key=lambda each: -len(each.tokens)):
        if each.tokens and all(token in vocabulary for token in each.tokens):
            return each
    return tool_format(FALLBACK)
