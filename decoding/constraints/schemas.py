"""Finds JSON schemas that ask for a value without end, which a grammar follows happily and never completes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

Holds = Callable[[Any], bool]
Matches = Callable[[str, str], bool | None]

SCALARS = {"string", "number", "integer", "boolean", "null"}


def unsure(pattern: str, name: str) -> bool | None:
    """Whether a name matches a pattern: not looked at."""
    return None


def endless(schema: Any, matches: Matches = unsure) -> str | None:
    """Why every value of a schema would be infinite; None where a finite one exists, or may.

    A schema is finite if a value can be made of values of finite schemas, references included: a required property
    that refers back to its own schema, with no other way out, is not. What is not understood here counts as finite.

    Args:
        schema: the JSON schema.
        matches: whether a name matches a pattern; None: that is not known.
    """
    known: set[int] = set()
    waiting: dict[int, list[dict[str, Any]]] = {}  # by a part that is not known yet: what may become known with it
    work = deque(_nodes(schema))
    while work:
        node = work.popleft()
        if id(node) in known:
            continue
        missing: list[int] = []
        if _finite(node, schema, known, missing, matches):
            known.add(id(node))
            work += waiting.pop(id(node), ())
        else:
            for part in missing:
                waiting.setdefault(part, []).append(node)
    if not isinstance(schema, dict) or id(schema) in known:
        return None
    return "it refers to itself where a value is required, so that every value would be infinite"


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


def _finite(node: dict[str, Any], root: Any, known: set[int], missing: list[int], matches: Matches) -> bool:
    """Whether a schema is, by those known; else `missing` gets the parts one of which must become known first."""

    def holds(part: Any) -> bool:
        if not isinstance(part, dict) or id(part) in known:
            return True
        missing.append(id(part))
        return False

    if "const" in node or "enum" in node:
        return True
    if isinstance(node.get("$ref"), str):
        found = _at(root, node["$ref"])
        if found is not None and not holds(found):
            return False
    for name in ("anyOf", "oneOf"):
        if isinstance(node.get(name), list) and node[name] and not any(map(holds, node[name])):
            return False
    if isinstance(node.get("allOf"), list) and not all(map(holds, node["allOf"])):
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
    for name in dict.fromkeys(each for each in required if isinstance(each, str)):
        if name in properties:
            if not holds(properties[name]):
                return False
            continue
        found = {pattern: matches(pattern, name) for pattern in patterns}
        if None in found.values():  # one that leads somewhere is enough
            if not any(map(holds, [*patterns.values(), others])):
                return False
            continue
        ways = [patterns[pattern] for pattern, is_so in found.items() if is_so]
        if not all(map(holds, ways or [others])):
            return False
    return True


def _finite_array(node: dict[str, Any], holds: Holds) -> bool:
    least = node.get("minItems")
    if not isinstance(least, int) or least <= 0:
        return True
    first = node.get("prefixItems")
    first = first if isinstance(first, list) else []
    return all(map(holds, first[:least])) and (least <= len(first) or holds(node.get("items")))


def _at(root: Any, reference: str) -> Any:
    """What a reference within the same schema points to; None where it points elsewhere."""
    if not reference.startswith("#"):
        return None
    here = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        else:
            return None
    return here
