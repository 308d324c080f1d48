"""Keywords of JSON Schema: which hold schemas, what their values may be, and which cannot be followed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]

SCHEMA = frozenset({"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items"})
SCHEMA |= {"not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
PLACED = "@"  # begins a `$comment` that says where things stood: paths from there, each with its place, as JSON
REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
LARGEST = 2**53  # beyond it not every whole number has a float of its own, which is what bounds are compared as
LARGEST_BOUND = 2**62
LARGEST_COUNT = 2**31 - 1

# With these values they allow everything; with some others they are rewritten (`rewritten.py`), the rest is refused.
UNSUPPORTED: dict[str, Any] = {
    "contains": None,
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "if": None,
    "maxContains": None,
    "minContains": None,
    "not": False,
    "propertyNames": True,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "uniqueItems": False,
}
ONLY_WITH = {"maxContains": "contains", "minContains": "contains"}


@dataclass(frozen=True, slots=True)
class Values:
    """Values that a keyword may have.

    Attributes:
        hold: whether a value is among them.
        words: what they are.
    """

    hold: Callable[[Any], bool]
    words: str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_exact(value: Any) -> bool:
    """Return whether every number in a value can be written as it is."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return abs(value) <= LARGEST


_TEXT = Values(lambda value: isinstance(value, str), "text")
_TEXTS = Values(
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of texts"
)
_NUMBER = Values(_is_number, "a number")
_BOUND = Values(lambda value: isinstance(value, bool) or _is_number(value), "a number")
_LEAST = Values(lambda value: _is_count(value) and value <= LARGEST_COUNT, f"a whole number, 0 to {LARGEST_COUNT}")
_MOST = Values(_is_count, "a whole number, at least 0")
_IS_SCHEMA = Values(lambda value: isinstance(value, dict | bool), "a schema: an object, true or false")
_ARE_SCHEMAS = Values(lambda value: isinstance(value, list) and bool(value), "a list of schemas that is not empty")
_ARE_NAMED = Values(lambda value: isinstance(value, dict), "an object of schemas")
_EXACT = f"numbers from {-LARGEST} to {LARGEST}"
ALLOWED: dict[str, Values] = {
    **dict.fromkeys(SCHEMA, _IS_SCHEMA),
    **dict.fromkeys(SCHEMAS, _ARE_SCHEMAS),
    **dict.fromkeys(NAMED, _ARE_NAMED),
    **dict.fromkeys((*REFERENCES, "$id", "$schema", "$anchor", "$dynamicAnchor", "pattern"), _TEXT),
    **dict.fromkeys(("minItems", "minLength", "minProperties"), _LEAST),
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties"), _MOST),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    "dependencies": Values(
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(each, dict | bool) or _TEXTS.hold(each) for each in value.values())
        ),
        "an object of lists of texts and of schemas",
    ),
    "dependentRequired": Values(
        lambda value: isinstance(value, dict) and all(map(_TEXTS.hold, value.values())), "an object of lists of texts"
    ),
    "const": Values(_is_exact, f"a value with {_EXACT}"),
    "enum": Values(
        lambda value: isinstance(value, list) and bool(value) and _is_exact(value),
        f"a list of values with {_EXACT}, and not empty",
    ),
    "format": Values(lambda value: value in FORMATS, f"one of {', '.join(FORMATS)}; no other is supported"),
    "items": Values(lambda value: isinstance(value, dict | bool | list), "a schema: an object, true or false"),
    "multipleOf": Values(
        lambda value: _is_number(value) and 0 < value <= LARGEST, f"a number above 0, at most {LARGEST}"
    ),
    "required": _TEXTS,
    "type": Values(
        lambda value: (
            value in TYPES
            if isinstance(value, str)
            else isinstance(value, list) and bool(value) and all(each in TYPES for each in value)
        ),
        f"one or a list of {', '.join(TYPES)}",
    ),
}
# Those that are followed, besides references; anything else but UNSUPPORTED says nothing of a value.
FOLLOWED = frozenset(
    {"additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"}
    | {
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
    }
    | {"multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "required", "type"}
)


def subschemas(key: str, value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas that a keyword holds, each with what leads to it from the keyword.

    Args:
        key: the keyword.
        value: its own, of the type that it must have.
    """
    if key in NAMED:
        yield from (((name,), each) for name, each in value.items())
    elif key == "dependencies":
        yield from (((name,), each) for name, each in value.items() if not isinstance(each, list))
    elif key in SCHEMAS or (key == "items" and isinstance(value, list)):
        yield from (((str(place),), each) for place, each in enumerate(value))
    elif key in SCHEMA:
        yield (), value


def says_nothing(key: str, value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a keyword of `UNSUPPORTED` allows everything as it stands in a schema."""
    if key not in UNSUPPORTED:
        return False
    needed = ONLY_WITH.get(key)
    if needed is not None:
        return needed not in schema
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in ("dependentSchemas", "dependencies", "dependentRequired"):
        return isinstance(value, dict) and all(each == [] or allows_everything(each) for each in value.values())
    harmless = UNSUPPORTED[key]
    if harmless is True:
        return allows_everything(value)
    return harmless is not None and type(value) is type(harmless) and value == harmless


def allows_everything(schema: Any) -> bool:
    """Return whether a schema plainly does: true, or nothing but annotations."""
    says = FOLLOWED | REFERENCES | UNSUPPORTED.keys()
    return schema is True or (isinstance(schema, dict) and says.isdisjoint(schema))


def placed(schema: dict[str, Any], moves: Iterable[tuple[Path, str]]) -> dict[str, Any]:
    """A schema with a comment that says where what is in it stood, for `place_in`.

    Args:
        schema: one of our making.
        moves: paths from the schema, () is itself, each with the place that what is there is to be called by.
    """
    pairs = [*_moves(schema), *([list(path), place] for path, place in moves)]
    return {**schema, "$comment": PLACED + json.dumps(pairs, ensure_ascii=False)} if pairs else schema


def has_moves(schema: Any) -> bool:
    """Return whether a schema has a comment of `placed`."""
    return bool(_moves(schema))


def place_in(schema: Any, path: Path) -> str:
    """A path of keywords and names as it stands in messages; names with dots or blanks in them are quoted.

    Args:
        schema: where it begins. Comments of `placed` say what else a part of it is called.
        path: from there.
    """
    node, place, covered = schema, "", 0
    for at in range(len(path) + 1):
        rest = list(path[at:])
        stood = [(at + len(steps), text) for steps, text in _moves(node) if rest[: len(steps)] == steps]
        end, text = max(stood, key=lambda each: each[0], default=(-1, ""))
        if end >= covered:
            place, covered = text, end
        if rest:
            if at >= covered:
                place, covered = joined(place, rest[0]), at + 1
            node = (
                node[int(rest[0])] if isinstance(node, list) else node.get(rest[0]) if isinstance(node, dict) else None
            )
    return place


def joined(place: str, *path: str) -> str:
    """A place, and a path from there."""
    return ".".join([*([place] if place else ()), *map(_segment, path)])


def _moves(node: Any) -> list[Any]:
    comment = node.get("$comment") if isinstance(node, dict) else None
    if not isinstance(comment, str) or not comment.startswith(PLACED):
        return []
    try:
        found = json.loads(comment.removeprefix(PLACED))
    except (ValueError, RecursionError):
        return []  # a caller's own comment
    return found if isinstance(found, list) and all(map(_is_move, found)) else []


def _is_move(move: Any) -> bool:
    return isinstance(move, list) and list(map(type, move)) == [list, str]


def _segment(name: str) -> str:
    short = name if len(name) <= 40 else name[:37] + "..."
    return short if short and not any(char in short for char in '. "\n\t') else json.dumps(short, ensure_ascii=False)
