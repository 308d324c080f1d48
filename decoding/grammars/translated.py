"""Keywords of JSON Schema in the form in which the library takes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from decoding.grammars.keywords import LARGEST_BOUND, LARGEST_COUNT


def translated(
    key: str, value: Any, node: dict[str, Any], inner: Callable[[Any], Any], is_old: bool
) -> dict[str, Any] | str:
    """Translate a keyword that is followed.

    Args:
        key: which.
        value: its own.
        node: the schema it stands in.
        inner: translates a schema.
        is_old: a draft before 2020-12.

    Returns:
        Keywords, or why its value is refused.
    """
    match key:
        case "items" if isinstance(value, list):
            rest = node.get("additionalItems")
            made = {"prefixItems": [inner(each) for each in value]}
            return made if rest is None else {**made, "items": inner(rest)}
        case "prefixItems" if is_old:
            return {}
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            if not isinstance(value, bool) and _is_outside(key, value):
                return f"must be from {-LARGEST_BOUND} to {LARGEST_BOUND}"
            return _bound(key, value, node)
        case "maxItems" | "maxLength" | "maxProperties":
            return {key: min(int(value), LARGEST_COUNT)}
        case "minProperties" if value > len(set(node.get("required", ()))) + 1:  # a name that comes twice counts once
            return "is supported up to one more than required has names"
        case "minItems" | "minLength" | "minProperties":
            return {key: int(value)}
        case "properties" | "patternProperties":
            return {key: {name: inner(each) for name, each in value.items()}}
        case "allOf" | "anyOf" | "oneOf" | "prefixItems":
            return {key: [inner(each) for each in value]}
        case "items" | "additionalProperties":
            return {key: inner(value)}
    return {key: value}


def _is_least(key: str) -> bool:
    return key.lower().endswith("minimum")


def _is_outside(key: str, value: float) -> bool:
    """Return whether a bound leaves no number that is followed."""
    return abs(value) > LARGEST_BOUND and (value > 0) is _is_least(key)


def _bound(key: str, value: Any, node: dict[str, Any]) -> dict[str, Any]:
    """A bound as it is compared: as a float, and if it has none, the next one inside."""
    is_least = _is_least(key)
    if isinstance(value, bool):  # as in draft 4
        other = node.get("minimum" if is_least else "maximum")
        return _bound(key, other, node) if value and other is not None else {}
    if abs(value) > LARGEST_BOUND:
        value = math.copysign(LARGEST_BOUND, value)
    near = float(value)
    if is_least and near < value:
        near = math.nextafter(near, math.inf)
    elif not is_least and near > value:
        near = math.nextafter(near, -math.inf)
    return {key: int(near) if near.is_integer() else near}
