"""Compile grammars, expressions and JSON schemas with llguidance for one vocabulary."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from decoding.constraints.base import FIELD, Vocabulary
from decoding.grammars.json_schemas import LIMITS, JsonSchemas
from decoding.grammars.lark_checks import barren, with_schemas
from decoding.grammars.matcher import GrammarConstraint, Respell, respelled
from decoding.grammars.pattern_names import Patterns
from decoding.grammars.refusals import NO_VALUE, REGEX_ERROR, shortened
from turnout.errors import TurnoutError, invalid
from turnout.structure import JSON_FORM


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """Make the library's tokenizer: `vocabulary.shared(tokenizer_of)`."""
    return LLTokenizer(vocabulary.definition, eos_token=min(vocabulary.end_ids))


class GrammarCompiler:
    """Compiler of one vocabulary: `vocabulary.shared(GrammarCompiler)`. May be used by several threads.

    Args:
        vocabulary: of the models that will be constrained.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._end_ids = vocabulary.end_ids
        self._definition = vocabulary.definition
        self._tokenizer = vocabulary.shared(tokenizer_of)
        self._schemas = JsonSchemas(self._tokenizer)

    def json_schema(self, value: Any) -> GrammarConstraint:
        """Compile a JSON schema.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the keyword that is not supported, or that no value fits.
        """
        schema = self._schemas.read(value)
        made = self._made(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM), self._respelled)
        if isinstance(made, str):
            raise self._schemas.refusal(schema, made)
        return made

    def lark(self, kind: str, text: str) -> GrammarConstraint:
        """Compile a grammar in Lark's notation, with the JSON schemas in it.

        Args:
            kind: what the grammar is called in refusals.
            text: the grammar.

        Raises:
            TurnoutError: INVALID_ARGUMENT: it is no valid grammar, uses what is not supported, is too large, or no
                text fits it.
        """
        schemas: list[Any] = []  # as the library gets them
        text = with_schemas(text, lambda schema: self._schemas.embedded(schema, schemas))
        reason = barren(text)
        if reason is not None:
            raise invalid(FIELD, f"no text fits the grammar: {reason}")
        made = self._made(LLMatcher.grammar_from_lark(text))
        if not isinstance(made, str):
            return made
        for schema in schemas:
            words = self._schemas.failure(schema)
            if words is not None:
                raise self._schemas.refusal(schema, words)
        raise _refused(kind, made)

    def compile(self, kind: str, grammar: str) -> GrammarConstraint:
        """Compile a grammar in the library's own form; see `lark`."""
        made = self._made(grammar)
        if isinstance(made, str):
            raise _refused(kind, made)
        return made

    def patterns(self) -> Patterns:
        """Says what names match what patterns."""
        return self._schemas.patterns()

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids by name of the tokens that the library allows only where they are named, flagged as special or not.

        Plain words among them are left out: a function may be called by one.
        """
        added = json.loads(self._definition).get("added_tokens", [])
        found = {each["content"]: each["id"] for each in added if self._tokenizer.is_special_token(each["id"])}
        return {name: token_id for name, token_id in found.items() if not name.isalnum()}

    def _made(self, grammar: str, respell: Respell | None = None) -> GrammarConstraint | str:
        """The constraint of an answer that has not begun; or why there is none, in the library's words."""
        matcher = LLMatcher(self._tokenizer, grammar, limits=LIMITS, log_level=0)
        if matcher.is_error():
            return str(matcher.get_error())
        constraint = GrammarConstraint(matcher, self._end_ids, self._tokenizer.vocab_size, respell)
        constraint.masks([], [()])
        return constraint.failure or constraint

    def _respelled(self, tokens: list[int]) -> list[int] | None:
        text = self._tokenizer.decode_bytes(tokens)
        plain = respelled(text)
        return None if plain == text else self._tokenizer.tokenize_bytes(plain)


def _refused(kind: str, said: str) -> TurnoutError:
    if NO_VALUE.search(said):
        return invalid(FIELD, f"no text fits the {kind}")
    found = REGEX_ERROR.search(said)
    return invalid(FIELD, f"the {kind} is refused: {shortened(found['words'] if found else said)}")
