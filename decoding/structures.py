"""Structures of requests: which kinds there are, checks before anything is compiled, and the compiler of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from decoding.constraints.base import FIELD, PACKAGE, ConstraintKind, Vocabulary
from decoding.grammars.refusals import shortened
from turnout.errors import Code, TurnoutError, invalid, out_of_range
from turnout.registry import load, names, validated
from turnout.structure import Structure

if TYPE_CHECKING:
    from decoding.constraints.base import Constraint


def public_kinds() -> list[str]:
    """Return the kinds that requests may ask for, sorted."""
    return [name for name in names(PACKAGE) if kind_of(name).public]


def kind_of(name: str, field: str = FIELD) -> type[ConstraintKind]:
    """Return a kind's class.

    Raises:
        TurnoutError: NOT_FOUND, listing those that exist.
    """
    found: type[ConstraintKind] = load(PACKAGE, name, field).PART
    return found


def checked_structure(given: Mapping[str, Any], field: str) -> Structure:
    """Return the structure that a request asks for, checked as far as it can be without a vocabulary.

    Args:
        given: `{kind: value}`, or with the members `kind` and `value`.
        field: of the request.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field and what is allowed.
    """
    known = public_kinds()
    asked = [given["kind"]] if "kind" in given else list(given)
    if len(asked) != 1 or asked[0] not in known:
        raise invalid(field, f"must hold exactly one of {', '.join(known)}")
    structure = validated(Structure, given, field)
    kind = check(structure, field)
    if not (kind.takes_json or "kind" in given or isinstance(given[kind.name], str)):
        raise invalid(field, f"{kind.name} must be a text")
    return structure


def check(structure: Structure, field: str = FIELD) -> type[ConstraintKind]:
    """Return a structure's kind, which takes its value.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT, naming the field.
    """
    kind, size = kind_of(structure.kind, field), len(structure.value)
    if size > kind.max_chars:
        raise invalid(field, f"{kind.name} is too large: {size} characters, at most {kind.max_chars}")
    kind.check_value(structure.value, field)
    return kind


def short_form(structure: Structure) -> dict[str, Any]:
    """Return a structure as bodies and clients write it."""
    return {structure.kind: kind_of(structure.kind).short(structure.value)}


class Compiler:
    """Compiles structures for one vocabulary. May be used by several threads.

    Args:
        vocabulary: of the models that will be constrained.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, structure: Structure) -> Constraint:
        """Return the constraint of an answer that has not begun.

        Raises:
            TurnoutError: NOT_FOUND: there is no such kind; INVALID_ARGUMENT, saying what is wrong with the structure:
                it uses what is not supported, is too large, or no text fits it. Of a JSON schema the field names the
                keyword.
        """
        return check(structure).compile(structure.value, self.vocabulary)


def check_whole(constraint: Constraint, tokens: list[int]) -> None:
    """An answer that ended has the text it was to have.

    Args:
        constraint: the answer's.
        tokens: of the answer, without the one that ended it.

    Raises:
        TurnoutError: OUT_OF_RANGE: the grammar became too complex, as it would again; INTERNAL: the text does not fit.
    """
    if constraint.accepts(tokens):
        return
    constraint.masks(tokens, [()])
    if constraint.failure:
        raise out_of_range(FIELD, f"could not be followed to its end: {shortened(constraint.failure)}")
    raise TurnoutError(Code.INTERNAL, f"{FIELD}: the answer does not fit it")
