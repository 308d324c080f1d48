"""Says which keyword of a JSON schema cannot be followed, and where it stands, in words of our own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from decoding.grammars.keywords import Path, place_in, subschemas

Refuses = Callable[[Any], str | None]

MAX_MESSAGE = 400
MOST_TRIES = 300
MOST_COSTLY_TRIES = 8  # where each may cost as much as a schema may
COMPLEX = "is too complex"
DEFINITIONS = "#/$defs/"
NO_VALUE = re.compile("unsatisfiable|noextension|regex is empty", re.IGNORECASE)
# What the library says, and what that means; the first that fits.
MEANINGS = [
    (NO_VALUE, "no value fits it"),
    (re.compile("oneOf"), "is supported where no value can fit two of the schemas; anyOf takes any"),
    (re.compile("disjoint"), "two patterns that may match one name are not supported"),
    (re.compile("circular references"), "leads back to itself, which is not supported next to other keywords"),
    (re.compile("min/maxProperties"), "is supported where every name in properties is required"),
    (re.compile("lookarounds"), r"\b, \B, and ^ or $ within an expression, are not supported"),
    (re.compile("multipleOf|multiple of"), "is supported up to 9 digits, in all and after the point"),
    (re.compile("Failed to generate"), "a bound of this size or with this many digits is not supported"),
    (re.compile("stack level|too large|fuel|limit|size|states|too many"), COMPLEX),
]
REGEX_ERROR = re.compile(r"regex parse error.*\berror: (?P<words>[^\n]*)", re.DOTALL)
TOGETHER = {"type", "$defs", "$comment"}


def meaning(said: str) -> str:
    """Put a message of the library into words about the schema or expression."""
    found = REGEX_ERROR.search(said)
    if found is not None:
        return f"is no regular expression that is supported: {found['words'].strip()}"
    return next((words for pattern, words in MEANINGS if pattern.search(said)), "cannot be followed")


def explain(schema: Any, said: str, refuses: Refuses) -> tuple[str, str]:
    """The place of the keyword for which a schema is refused, dotted, and what is wrong there.

    The library says what, and not where. So schemas of less and less of this one are tried, up to `MOST_TRIES`.

    Args:
        schema: the JSON schema, as `FlatSchema.whole`.
        said: the library's message.
        refuses: the library's message about another schema; None where it takes it.
    """
    tries = MOST_COSTLY_TRIES if meaning(said) == COMPLEX else MOST_TRIES
    path, keys, said = _Search(schema, refuses, tries).culprit((), schema, said)
    words = meaning(said)
    if len(keys) > 1 and NO_VALUE.search(said):
        own = place_in(schema, path)
        others = [place_in(schema, (*path, key)).removeprefix(f"{own}.") for key in keys[1:4]]
        words = f"no value fits it together with {' and '.join(dict.fromkeys(others))}"
    return place_in(schema, (*path, *keys[:1])), words


class _Search:
    """A search for the innermost keyword without which a schema is taken."""

    def __init__(self, schema: Any, refuses: Refuses, tries: int) -> None:
        self._definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._refuses = refuses
        self._tries = tries
        self._seen: set[int] = set()

    def culprit(self, path: Path, node: Any, said: str) -> tuple[Path, list[str], str]:
        """The path of the innermost schema that is refused, its keywords that are to blame, and the message."""
        while isinstance(node, dict):
            self._seen.add(id(node))
            keys = self._keys(node)
            inner = next(self._inner(path, node, keys, said), None)
            if inner is None:
                return path, keys, said
            path, node, said = inner
        return path, [], said

    def _keys(self, node: dict[str, Any]) -> list[str]:
        """Keywords without which a schema is taken, or which alone are refused."""
        keys = [key for key in node if key not in TOGETHER]
        found = [key for key in keys if self._said({other: node[other] for other in node if other != key}) is None]
        types = {"type": node["type"]} if "type" in node else {}
        return found or [key for key in keys if self._said({**types, key: node[key]}) is not None] or keys

    def _inner(self, path: Path, node: dict[str, Any], keys: list[str], said: str) -> Iterator[tuple[Path, Any, str]]:
        """Schemas within these keywords that are refused for the same."""
        for key in keys:
            for pattern in node[key] if key == "patternProperties" else ():
                words = self._said({"type": "object", key: {pattern: True}})
                if words is not None:
                    yield (*path, key, pattern), None, words
            for step, child, target in self._children(path, key, node):
                if id(child) in self._seen or (NO_VALUE.search(said) and not _needed(key, step, node)):
                    continue
                words = self._said(child)
                if words is not None and meaning(words) == meaning(said):
                    yield target, child, words

    def _children(self, path: Path, key: str, node: dict[str, Any]) -> Iterator[tuple[Path, Any, Path]]:
        """Yield for each schema within a keyword: what leads to it, the schema, and its path."""
        if key == "$ref":
            name = node[key].removeprefix(DEFINITIONS)
            yield (), self._definitions.get(name), ("$defs", name)
            return
        for step, child in subschemas(key, node[key]):
            yield step, child, (*path, key, *step)

    def _said(self, node: Any) -> str | None:
        self._tries -= 1
        if self._tries < 0 or node is True:
            return None
        if node is False:
            return "Unsatisfiable: false"
        return self._refuses({**node, "$defs": self._definitions} if isinstance(node, dict) else node)


def _needed(key: str, step: Path, node: dict[str, Any]) -> bool:
    """Return whether a schema within a keyword must have a value for the whole to have one."""
    if key == "properties":
        return step[0] in node.get("required", ())
    if key in ("additionalProperties", "patternProperties"):
        return False
    if key in ("items", "prefixItems"):
        return bool(node.get("minItems", 0))
    return True


def shortened(said: str) -> str:
    """Return the library's words on one line, cut to a length that a message can hold."""
    line = " ".join(said.split())
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."
