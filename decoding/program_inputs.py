"""Inputs on which sampled programs are compared: small and edge values of the types that their parameters name."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from decoding.noise import derive_seed

VALUES: dict[str, tuple[Any, ...]] = {
    "int": (0, 1, 2, -1, 3, 5, 10, 7, -4, 16, 100, 12, 97, 1000, -25, 6),
    "float": (0.0, 1.0, -1.5, 2.5, 0.1, 10.0, -0.25, 100.75),
    "bool": (True, False),
    "str": ("", "a", "abc", "aba", "Hello, World", "ab ab", "A1 b2", "racecar", "12", "(())", "zZ", "a,b,,c", " x "),
    "None": (None,),
}
LISTS = {"list", "sequence", "iterable", "collection", "mutablesequence", "tuple", "set", "frozenset", "iterator"}
LENGTHS = (0, 1, 3, 2, 5, 8)
KINDS = ("int", "str", "list[int]", "list[str]", "float", "list[list[int]]", "dict[str, int]", "bool")  # untyped ones
DEEPEST = 4


def make_inputs(annotations: Items[str], count: int) -> list[list[Any]]:
    """Make arguments for functions with these parameters: the same for the same parameters.

    Args:
        annotations: of each parameter; "": any type, of which values take turns.
        count: how many inputs.

    Returns:
        `count` lists of JSON-like arguments.
    """
    return [
        [_value(_parsed(each or _any_kind(turn, place)), turn, place, 0) for place, each in enumerate(annotations)]
        for turn in range(count)
    ]


def common_annotations(signatures: Iterable[Items[str]]) -> list[str]:
    """Return the parameters that most programs have: their usual number, and the first type that one names for each."""
    every = list(signatures)
    counts = [len(each) for each in every]
    usual = max(counts, key=lambda count: (counts.count(count), -counts.index(count)))
    fitting = [each for each in every if len(each) == usual]
    return [next((each[place] for each in fitting if each[place]), "") for place in range(usual)]


def _parsed(annotation: str) -> ast.expr:
    try:
        return ast.parse(annotation, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Constant(None)


def _value(kind: ast.expr, turn: int, place: int, depth: int) -> Any:
    """The value of one parameter for one input; of a type that is not known, values of all kinds take turns."""
    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
        return _value(_parsed(kind.value), turn, place, depth)
    if isinstance(kind, ast.BinOp):  # X | Y
        return _value(kind.left if (turn + place) % 4 else kind.right, turn, place, depth)
    name = _name(kind)
    if name in VALUES:
        values = VALUES[name]
        # The first inputs walk through the values, each parameter from another one on; then they are mixed.
        at = turn + place if turn < len(values) and not depth else derive_seed(turn + 1, 64 * depth + place + 1)
        return values[at % len(values)]
    inner = kind.slice if isinstance(kind, ast.Subscript) else None
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [] if inner is None else [inner]
    if depth >= DEEPEST:
        return None
    if name in ("optional", "union") and parts:
        return None if name == "optional" and turn % 4 == 3 else _value(parts[turn % len(parts)], turn, place, depth)
    if name in ("dict", "mapping", "defaultdict", "counter"):
        key, value = (*parts, *(ast.Name("str"), ast.Name("int"))[len(parts) :])[:2]
        places = range(_length(turn, depth))
        return {str(_value(key, turn, n, depth + 1)): _value(value, turn, n, depth + 1) for n in places}
    if name == "tuple" and len(parts) > 1 and not isinstance(parts[-1], ast.Constant):
        return [_value(each, turn, place + n, depth + 1) for n, each in enumerate(parts)]
    if name in LISTS:
        item = parts[0] if parts else ast.Name("int")
        return [_value(item, turn, place + n, depth + 1) for n in range(_length(turn, depth))]
    return _value(_parsed(_any_kind(turn, place)), turn, place, depth + 1)


def _any_kind(turn: int, place: int) -> str:
    """A kind of values; every other input has the same one for all parameters."""
    at = turn // 2 if turn % 2 == 0 else derive_seed(turn, place + 1)
    return KINDS[at % len(KINDS)]


def _length(turn: int, depth: int) -> int:
    return LENGTHS[(turn + depth) % len(LENGTHS)]


def _name(kind: ast.expr) -> str:
    """Name of a type without its module, lists and mappings in small letters."""
    if isinstance(kind, ast.Subscript):
        kind = kind.value
    if isinstance(kind, ast.Constant) and kind.value is None:
        return "None"
    name = kind.attr if isinstance(kind, ast.Attribute) else kind.id if isinstance(kind, ast.Name) else ""
    return name if name in VALUES else name.lower()
