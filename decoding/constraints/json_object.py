"""Any JSON object; its value is `true`."""

from __future__ import annotations

from typing import ClassVar

from llguidance import LLMatcher

from decoding.constraints.base import Constraint, ConstraintKind, Vocabulary
from decoding.grammars.compiler import GrammarCompiler
from turnout.errors import invalid
from turnout.structure import JSON_FORM
from turnout.tool_formats.base import json_rule


class JsonObject(ConstraintKind):
    """See the module."""

    takes_json = True
    examples: ClassVar = [("true", '{"a": [1, null]}'), ("", "{}")]

    @classmethod
    def check_value(cls, value: str, field: str) -> None:
        """See `ConstraintKind.check_value`; in the long form the value may be left out."""
        if value not in ("true", ""):
            raise invalid(field, f"{cls.name} must be true; leave the structure out where none is wanted")

    @classmethod
    def short(cls, value: str) -> bool:
        """See `ConstraintKind.short`."""
        return True

    @classmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """See `ConstraintKind.compile`."""
        grammar = LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_FORM)
        return vocabulary.shared(GrammarCompiler).compile(cls.name, grammar)

    @classmethod
    def rule(cls, value: str) -> str:
        """See `ConstraintKind.rule`."""
        return json_rule({"type": "object"})


PART = JsonObject
