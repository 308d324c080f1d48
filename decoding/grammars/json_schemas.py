"""JSON schemas as llguidance follows them, and refusals of those that it does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from decoding.constraints.base import FIELD
from decoding.grammars.flat_schemas import FlatSchema
from decoding.grammars.keywords import Path, place_in
from decoding.grammars.pattern_names import Patterns, spell_out
from decoding.grammars.refusals import explain
from decoding.grammars.schemas import ENDLESS, endless
from turnout.errors import TurnoutError, invalid
from turnout.structure import JSON_FORM, MAX_DEPTH

# Of a schema in a grammar. A tool's stands two levels deeper there, and its references may need two more.
MAX_EMBEDDED_DEPTH = MAX_DEPTH + 4
CIRCULAR = "circular references"  # in a message of the library
# What one grammar may cost: to compile, and at each token. Beyond, the grammar is refused or the answer fails.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class JsonSchemas:
    """Reads JSON schemas for one tokenizer. May be used by several threads.

    Args:
        tokenizer: any.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def patterns(self) -> Patterns:
        """Says what names match what patterns."""
        return Patterns(self._tokenizer, LIMITS)

    def read(self, value: Any) -> Any:
        """A schema as the library takes it.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming the keyword: see `FlatSchema`; or no value fits.
        """
        patterns, value = self.patterns(), {} if value is True else value
        flat = FlatSchema(value, FIELD)
        schema = spell_out(flat.whole, patterns)
        if flat.has_siblings and CIRCULAR in (self.failure(schema) or "") and endless(schema, patterns) is None:
            schema = spell_out(FlatSchema(value, FIELD, unroll=True).whole, patterns)
        if schema is False:
            raise invalid(FIELD, "no text fits the JSON schema: it is false")
        path = endless(schema, patterns)
        if path is not None:
            raise _refusal(place_in(schema, path), f"no text fits the JSON schema: {ENDLESS}")
        return schema

    def embedded(self, value: Any, found: list[Any]) -> Any:
        """A schema that stands in a grammar; one with a form of its own is left to the library.

        Args:
            value: the schema.
            found: gets the schema as the library takes it.

        Raises:
            TurnoutError: as `read`, and where it has too many levels.
        """
        _check_depth(value)
        form = {"x-guidance": JSON_FORM}
        if not isinstance(value, dict) or value.get("x-guidance", JSON_FORM) != JSON_FORM:
            return value
        found.append(self.read({key: each for key, each in value.items() if key not in form}))
        return {**form, **found[-1]} if "x-guidance" in value else found[-1]

    def failure(self, schema: Any) -> str | None:
        """Why the library does not follow a schema, in its words; None where it does."""
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
        matcher = LLMatcher(self._tokenizer, grammar, limits=LIMITS, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return (matcher.get_error() or "unknown") if matcher.is_error() else None

    def refusal(self, schema: Any, said: str) -> TurnoutError:
        """Return the error message for a schema that the library does not follow.

        Args:
            schema: as it was given to the library.
            said: the library's words.
        """
        place, words = explain(schema, said, self.failure)
        return _refusal(place, words)


def _check_depth(value: Any) -> None:
    level: list[tuple[Path, Any]] = [((), value)]
    for _ in range(MAX_EMBEDDED_DEPTH + 1):
        level = [((*path, step), each) for path, node in level for step, each in _below(node)]
        if not level:
            return
    words = f"is nested too deeply: a schema in a grammar has at most {MAX_EMBEDDED_DEPTH} levels"
    raise _refusal(place_in(value, level[0][0]), words)


def _below(node: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(node, dict):
        return node.items()
    return ((str(place), each) for place, each in enumerate(node)) if isinstance(node, list) else ()


def _refusal(place: str, words: str) -> TurnoutError:
    return invalid(f"{FIELD}.{place}" if place else FIELD, words)
