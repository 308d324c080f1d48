"""Finds JSON schemas that ask for a value without end, which a grammar follows happily and never completes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Path = tuple[str, ...]
Holds = Callable[..., bool]
Matches = Callable[[str, str], bool | None]
Missing = list[tuple[Path, dict[str, Any]]]  # what leads to it, and what it is

SCALARS = {"string", "number", "integer", "boolean", "null"}
DEFINITIONS = "#/$defs/"
ENDLESS = "it refers to itself where a value is required, so that every value would be infinite"


def unsure(pattern: str, name: str) -> bool | None:
    """Return None: it is not known whether a name matches a pattern."""
    return None


def endless(schema: Any, matches: Matches = unsure) -> Path | None:
    """Where a schema refers to itself so that every value would be infinite; None where a finite one exists, or may.

    A schema is finite if a value can be made of values of finite schemas, references included: a required property
    that refers back to its own schema, with no other way out, is not. What is not understood here counts as finite.

    Args:
        schema: the JSON schema, as `FlatSchema.whole`.
        matches: whether a name matches a pattern; None: that is not known.
    """
    known: set[int] = set()
    waiting: dict[int, list[dict[str, Any]]] = {}  # by a part that is not known yet: what may become known with it
    work = deque(_nodes(schema))
    while work:
        node = work.popleft()
        if id(node) in known:
            continue
        missing: Missing = []
        if _finite(node, schema, known, missing, matches):
            known.add(id(node))
            work += waiting.pop(id(node), ())
        else:
            for _, part in missing:
                waiting.setdefault(id(part), []).append(node)
    if not isinstance(schema, dict) or id(schema) in known:
        return None
    return _way_back(schema, known, matches)


def _way_back(schema: dict[str, Any], known: set[int], matches: Matches) -> Path:
    """The place in a schema without finite values that leads to one of those that led to it."""
    path: Path = ()
    node, seen = schema, set[int]()
    while True:
        seen.add(id(node))
        missing: Missing = []
        _finite(node, schema, known, missing, matches)
        step, part = missing[0]
        if id(part) in seen:
            return (*path, *step)
        path = ("$defs", node["$ref"].removeprefix(DEFINITIONS)) if step == ("$ref",) else (*path, *step)
        node = part


def _nodes(schema: Any) -> list[dict[str, Any]]:
    """Every object in a schema, whatever it is used for; inner ones first."""
    found: list[dict[str, Any]] = []
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found.append(value)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found[::-1]


def _finite(node: dict[str, Any], root: Any, known: set[int], missing: Missing, matches: Matches) -> bool:
    """Return whether a schema is finite, given those known; else add the parts to become known to `missing`."""

    def holds(part: Any, *path: str) -> bool:
        if not isinstance(part, dict) or id(part) in known:
            return True
        missing.append((path, part))
        return False

    def each_holds(key: str) -> list[bool]:
        return [holds(part, key, str(place)) for place, part in enumerate(node[key])]

    if "const" in node or "enum" in node:
        return True
    reference = node.get("$ref")
    if isinstance(reference, str):
        target = root.get("$defs", {}).get(reference.removeprefix(DEFINITIONS))
        if not holds(target, "$ref"):
            return False
    for key in ("anyOf", "oneOf"):
        if isinstance(node.get(key), list) and node[key] and not any(each_holds(key)):
            return False
    if isinstance(node.get("allOf"), list) and not all(each_holds("allOf")):
        return False
    types = node.get("type")
    types = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else SCALARS
    if types - {"object", "array"}:
        return True
    return ("object" in types and _finite_object(node, holds, matches)) or (
        "array" in types and _finite_array(node, holds)
    )


def _finite_object(node: dict[str, Any], holds: Holds, matches: Matches) -> bool:
    properties, required = node.get("properties", {}), node.get("required")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return True
    patterns, others = node.get("patternProperties", {}), node.get("additionalProperties")
    patterns = patterns if isinstance(patterns, dict) else {}

    def follows(pattern: str) -> bool:
        return holds(patterns[pattern], "patternProperties", pattern)

    for name in dict.fromkeys(each for each in required if isinstance(each, str)):
        if name in properties:
            if not holds(properties[name], "properties", name):
                return False
            continue
        found = {pattern: matches(pattern, name) for pattern in patterns}
        if None in found.values():  # one that leads somewhere is enough
            if not any(map(follows, patterns)) and not holds(others, "additionalProperties"):
                return False
            continue
        ways = [pattern for pattern, is_so in found.items() if is_so]
        if not (all(map(follows, ways)) if ways else holds(others, "additionalProperties")):
            return False
    return True


def _finite_array(node: dict[str, Any], holds: Holds) -> bool:
    least = node.get("minItems")
    if not isinstance(least, int) or least <= 0:
        return True
    first = node.get("prefixItems")
    first = first if isinstance(first, list) else []
    firsts = [holds(part, "prefixItems", str(place)) for place, part in enumerate(first[:least])]
    return all(firsts) and (least <= len(first) or holds(node.get("items"), "items"))
