"""A regular expression that the whole answer matches: Rust's syntax, without look-around and back references."""

from __future__ import annotations

import re
from typing import ClassVar

from llguidance import LLMatcher

from decoding.constraints.base import Constraint, ConstraintKind, Vocabulary
from decoding.grammars.compiler import GrammarCompiler

_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")
ESCAPED_SLASH = r"\1\/"


class Regex(ConstraintKind):
    """See the module."""

    examples: ClassVar = [("[0-9]+(;[a-c]{2})?", "42;ab"), (r"a/b|\d", "a/b")]

    @classmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """See `ConstraintKind.compile`."""
        return vocabulary.shared(GrammarCompiler).compile(cls.name, LLMatcher.grammar_from_regex(value))

    @classmethod
    def rule(cls, value: str) -> str:
        """See `ConstraintKind.rule`."""
        return f"%lark {{\nstart: /{_SLASH.sub(ESCAPED_SLASH, value)}/\n}}"


PART = Regex
