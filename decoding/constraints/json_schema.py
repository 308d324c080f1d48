"""A JSON schema that the answer fits: an object, true, or false (which no text fits)."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from decoding.constraints.base import Constraint, ConstraintKind, Vocabulary, parsed
from decoding.grammars.compiler import GrammarCompiler
from turnout.errors import invalid
from turnout.structure import MAX_DEPTH, MAX_NODES
from turnout.tool_formats.base import json_rule


class JsonSchema(ConstraintKind):
    """See the module."""

    takes_json = True
    examples: ClassVar = [
        ('{"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2}', '["x", 1]'),
        ('{"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": false}', '{"ab": 7}'),
    ]

    @classmethod
    def check_value(cls, value: str, field: str) -> None:
        """See `ConstraintKind.check_value`: it has a size that can be compiled."""
        super().check_value(value, field)
        schema = parsed(value, cls.name, field)
        if not isinstance(schema, dict | bool):
            raise invalid(field, f"{cls.name} must be an object, true or false")
        if isinstance(schema, dict) and "x-guidance" in schema:
            raise invalid(field, f"{cls.name} must not hold x-guidance: how JSON is written is not chosen")
        nodes, level = 0, [schema]
        for depth in range(MAX_DEPTH + 1):
            nodes += len(level)
            if nodes > MAX_NODES:
                raise invalid(field, f"{cls.name} is too large: more than {MAX_NODES} values")
            level = [below for each in level for below in _below(each)]
            if not level:
                return
            if depth == MAX_DEPTH:
                raise invalid(field, f"{cls.name} is nested too deeply: at most {MAX_DEPTH} levels")

    @classmethod
    def short(cls, value: str) -> Any:
        """See `ConstraintKind.short`."""
        return json.loads(value)

    @classmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """See `ConstraintKind.compile`."""
        return vocabulary.shared(GrammarCompiler).json_schema(json.loads(value))

    @classmethod
    def rule(cls, value: str) -> str:
        """See `ConstraintKind.rule`."""
        schema = json.loads(value)
        return json_rule({} if schema is True else schema)


def _below(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


PART = JsonSchema
