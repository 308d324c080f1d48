"""Texts, 1 to 1,024, one of which is the answer."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from llguidance import LLMatcher

from decoding.constraints.base import Constraint, ConstraintKind, Vocabulary, parsed
from decoding.grammars.compiler import GrammarCompiler
from turnout.errors import invalid
from turnout.structure import MAX_CHOICES


class Choice(ConstraintKind):
    """See the module."""

    takes_json = True
    examples: ClassVar = [('["yes", "no", "not yet"]', "no")]

    @classmethod
    def check_value(cls, value: str, field: str) -> None:
        """See `ConstraintKind.check_value`."""
        super().check_value(value, field)
        texts = parsed(value, cls.name, field)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise invalid(field, f"{cls.name} must be a list of texts that are not empty")
        if len(texts) > MAX_CHOICES:
            raise invalid(field, f"{cls.name} has {len(texts)} texts; at most {MAX_CHOICES}")

    @classmethod
    def short(cls, value: str) -> Any:
        """See `ConstraintKind.short`."""
        return json.loads(value)

    @classmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """See `ConstraintKind.compile`."""
        grammar = LLMatcher.grammar_from_lark(f"start: {cls.rule(value)}")
        return vocabulary.shared(GrammarCompiler).compile(cls.name, grammar)

    @classmethod
    def rule(cls, value: str) -> str:
        """See `ConstraintKind.rule`."""
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(value))
        return texts.replace("\x7f", "\\u007f")


PART = Choice
