"""A grammar in Lark's notation, as llguidance takes it; the answer is a `start`."""

from __future__ import annotations

from typing import ClassVar

from decoding.constraints.base import Constraint, ConstraintKind, Vocabulary
from decoding.grammars.compiler import GrammarCompiler


class Grammar(ConstraintKind):
    """See the module."""

    examples: ClassVar = [('start: "<" start ">" | "x"', "<<x>>")]

    @classmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """See `ConstraintKind.compile`."""
        return vocabulary.shared(GrammarCompiler).lark(cls.name, value)

    @classmethod
    def rule(cls, value: str) -> str:
        """See `ConstraintKind.rule`."""
        return f"%lark {{\n{value}\n}}"


PART = Grammar
