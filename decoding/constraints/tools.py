"""Calls of functions that a request offers; the server's own kind, not to be asked for."""

from __future__ import annotations

from typing import ClassVar

from decoding.constraints.base import FIELD, Constraint, ConstraintKind, Vocabulary
from decoding.grammars.compiler import GrammarCompiler
from decoding.structures import Compiler, kind_of
from turnout.errors import TurnoutError, invalid
from turnout.structure import MAX_TOOLS_CHARS, Structure
from turnout.tool_formats.grammar import CallRules, grammar_of

ANSWER = "answer"  # in a field: what an answer without a call must fit


class Tools(ConstraintKind):
    """See the module; its value is written by `turnout.tool_formats.grammar.CallRules`."""

    public = False
    max_chars = MAX_TOOLS_CHARS
    examples: ClassVar = [
        (
            CallRules({"f": {"type": "object", "additionalProperties": False}}, form="hermes").structure.value,
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        )
    ]

    @classmethod
    def compile(cls, value: str, vocabulary: Vocabulary) -> Constraint:
        """See `ConstraintKind.compile`; what answers may fit instead is compiled by itself first, for its refusals."""
        rules = CallRules.of(Structure(kind=cls.name, value=value))
        answer = None
        if rules.answer is not None:
            own = f"{FIELD}.{ANSWER}"
            try:
                Compiler(vocabulary).compile(rules.answer)
            except TurnoutError as error:
                words = error.message.removeprefix(f"{error.field}: ")
                raise invalid(own + (error.field or "").removeprefix(FIELD), words) from None
            answer = kind_of(rules.answer.kind).rule(rules.answer.value)
            if answer is None:
                raise invalid(own, f"{rules.answer.kind} cannot be combined with tools")
        grammars = vocabulary.shared(GrammarCompiler)
        return grammars.lark(cls.name, grammar_of(rules, grammars.special, answer))


PART = Tools
