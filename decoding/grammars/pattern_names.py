"""Names that patterns of JSON schemas match, and patterns that match only names that a schema spells out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from decoding.grammars.keywords import Path, joined, place_in, placed, subschemas
from turnout.structure import JSON_FORM

MOST_MATCHES = 2048


class Patterns:
    """Matcher of names against patterns of a JSON schema, as the library that follows it takes them.

    Args:
        tokenizer: any.
        limits: of what a pattern may cost.
    """

    def __init__(self, tokenizer: LLTokenizer, limits: LLParserLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._known: dict[tuple[str, str], bool | None] = {}
        self._matchers: dict[str, LLMatcher] = {}

    def __call__(self, pattern: str, name: str) -> bool | None:
        """None where it is no pattern, or others enough have been looked at."""
        if (pattern, name) not in self._known and len(self._known) < MOST_MATCHES:
            self._known[pattern, name] = self._match(pattern, name)
        return self._known.get((pattern, name))

    def has_others(self, pattern: str, names: list[str]) -> bool:
        """Return whether a pattern matches a name that is none of these, each of which it matches.

        Where the library cannot say, it does.
        """
        taken = {"properties": {name: {"const": 0} for name in names}, "required": names}
        others = {"patternProperties": {pattern: True}, "additionalProperties": False, "minProperties": len(names) + 1}
        matcher = self._matcher({"type": "object", **taken, **others})
        text = "{" + "".join(f"{_quoted(name)}: 0, " for name in names)
        if matcher.is_error() or not matcher.consume_tokens(self._tokens(text)):
            return True
        matcher.compute_bitmask()
        return not matcher.is_error()

    def _match(self, pattern: str, name: str) -> bool | None:
        matcher = self._matchers.get(pattern)
        if matcher is None:
            matcher = self._matchers[pattern] = self._matcher({"type": "string", "pattern": pattern})
        if matcher.is_error():
            return None
        fresh, tokens = matcher.deep_copy(), self._tokens(_quoted(name))
        taken = fresh.try_consume_tokens(tokens)
        return None if fresh.is_error() else taken == len(tokens) and fresh.is_accepting()

    def _matcher(self, schema: Any) -> LLMatcher:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
        return LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.tokenize_bytes(text.encode())


def spell_out(schema: Any, patterns: Patterns) -> Any:
    """A schema with its `patternProperties` that match no name but those spelled out in it as `properties`.

    The library excludes names that it knows from the others that a pattern matches. Where none is left, it expects one
    all the same, and an answer that came there could not be completed.

    Args:
        schema: the JSON schema, as `FlatSchema.whole`; it is changed.
        patterns: of it.
    """
    objects = [(path, node) for path, node in _schemas(schema) if node.get("patternProperties")]
    if not objects:
        return schema
    names = list(dict.fromkeys(name for _, node in _schemas(schema) for name in _names(node)))
    spelled: dict[str, list[str] | None] = {}
    for path, node in objects:
        kept, stood, own = dict[str, Any](), dict[Path, str](), place_in(schema, path)
        if "properties" not in node:
            stood["properties",] = joined(own, "patternProperties")
        for pattern, value in node["patternProperties"].items():
            if pattern not in spelled:
                matched = [name for name in names if patterns(pattern, name)]
                spelled[pattern] = None if patterns.has_others(pattern, matched) else matched
            found = spelled[pattern]
            if found is None:
                kept[pattern] = value
                continue
            properties = node.setdefault("properties", {})
            place = joined(own, "patternProperties", pattern)
            for name in found:
                before = stood.get(("properties", name), joined(own, "properties", name))
                if name in properties:
                    moves = [(("allOf",), before), (("allOf", "0"), before), (("allOf", "1"), place)]
                    properties[name] = placed({"allOf": [properties[name], value]}, moves)
                else:
                    properties[name], stood["properties", name] = value, place
        node["patternProperties"] = kept
        if not kept:
            del node["patternProperties"]
        node.update(placed(node, stood.items()))
    return schema


def _schemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, dict):
            yield path, node
            waiting += (
                ((*path, key, *rest), each) for key, value in node.items() for rest, each in subschemas(key, value)
            )


def _names(node: dict[str, Any]) -> list[str]:
    return [*node.get("properties", ()), *node.get("required", ())]


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
