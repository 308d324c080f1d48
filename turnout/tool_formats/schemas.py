"""JSON schemas of arguments as tool formats that are no JSON need them: the kinds of a value, and the parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_REFERENCES = 32
MAX_LOOKED_AT = 256  # schemas that one question looks at: references can name the same ones without end
# What templates that print values write for JSON's literals.
PRINTED = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a function, or members of an object.

    Attributes:
        named: their schemas by name.
        required: those that must be given.
        others: schema of further ones; None: there are none.
    """

    named: dict[str, Any]
    required: frozenset[str]
    others: Any


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Return a schema without references at its top; keywords next to a reference are kept."""
    found = schema if isinstance(schema, dict) else {}
    for _ in range(MAX_REFERENCES):
        if "$ref" not in found:
            break
        target: Any = root
        for step in str(found["$ref"]).removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            target = target.get(name, {}) if isinstance(target, dict) else {}
        rest = {key: value for key, value in found.items() if key not in ("$ref", "$defs")}
        found = {**(target if isinstance(target, dict) else {}), **rest}
    return found


def kind_of(value: Any) -> str:
    """Return a JSON value's kind."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the kinds that values of a schema may have; more than those where it is too large to be looked through."""
    return _kinds(schema, root, iter(range(MAX_LOOKED_AT)))


def _kinds(schema: Any, root: Any, looks: Iterator[int]) -> frozenset[str]:
    if next(looks, None) is None:
        return KINDS
    given = resolved(schema, root)
    found = KINDS
    if "type" in given:
        named = frozenset([given["type"]] if isinstance(given["type"], str) else given["type"])
        found &= named | {"integer"} if "number" in named else named
    if (values := listed(given)) is not None:
        found &= frozenset(map(kind_of, values))
    for each in given.get("allOf", ()):
        found &= _kinds(each, root, looks)
    for keyword in ("anyOf", "oneOf"):
        if branches := given.get(keyword):
            found &= frozenset().union(*(_kinds(each, root, looks) for each in branches))
    return found


def listed(given: dict[str, Any]) -> list[Any] | None:
    """Return the values that a resolved schema lists; None: it lists none."""
    return [given["const"]] if "const" in given else given.get("enum")


def parameters_of(schema: Any, root: Any) -> Parameters:
    """Return the parameters that a schema of an object has."""
    named: dict[str, Any] = {}
    required: frozenset[str] = frozenset()
    others: Any = True
    for part in _parts(schema, root, iter(range(MAX_LOOKED_AT))):
        named |= part.get("properties", {})
        required |= frozenset(part.get("required", ()))
        others = part.get("additionalProperties", others)
    named |= {name: True for name in sorted(required) if name not in named}
    return Parameters(named, required, None if others is False or (others is True and named) else others)


def _parts(schema: Any, root: Any, looks: Iterator[int]) -> Iterator[dict[str, Any]]:
    if next(looks, None) is None:
        return
    given = resolved(schema, root)
    yield given
    for each in given.get("allOf", ()):
        yield from _parts(each, root, looks)


def as_json(text: str, kinds: frozenset[str]) -> str:
    """Return a value that was written without quotes as JSON: of one of some kinds, if it can be."""
    bare = text.strip()
    bare = PRINTED.get(bare, bare)
    try:
        kind = kind_of(json.loads(bare, parse_constant=_no_json))
    except (ValueError, RecursionError):
        kind = ""
    if kind in kinds or (kind and "string" not in kinds):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _no_json(name: str) -> Any:
    raise ValueError(name)


def unfinished(text: str, mark: str) -> int:
    """Return how many characters at the end of a text can be the beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
