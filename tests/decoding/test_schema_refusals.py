"""Refusals of JSON schemas: each place is one of the schema that was given, and none is too deep to be refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decoding.grammars.flat_schemas import MOST_UNROLLED, FlatSchema
from decoding.grammars.json_schemas import MAX_EMBEDDED_DEPTH
from tests.constrained import byte_compiler, exists, fits
from turnout.errors import Code, TurnoutError
from turnout.structure import MAX_DEPTH, Structure

DRAFT_6 = "http://json-schema.org/draft-06/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
NUMBER: Any = {"type": "integer"}


def refused(structure: dict[str, Any]) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        byte_compiler().compile(Structure.model_validate(structure))
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value


def nested(levels: int) -> Any:
    """Arrays in arrays, one level of JSON for each."""
    schema: Any = {"type": "array"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REQUIRED = {"type": "object", "required": ["a"]}
EMPTY = {"type": "integer", "minimum": 3, "maximum": 2}
PLACES: dict[str, tuple[Any, str]] = {
    "false": (
        {**REQUIRED, "properties": {"a": {"$ref": "#/$defs/no"}}, "$defs": {"no": False}},
        "properties.a.$ref",
    ),
    "false next to allOf": ({"$ref": "#/$defs/no", "allOf": [NUMBER], "$defs": {"no": False}}, "$ref"),
    "allOf next to true": ({"$ref": "#/$defs/t", "allOf": [NUMBER, EMPTY], "$defs": {"t": True}}, "allOf.1.minimum"),
    "false in allOf next to true": ({"$ref": "#/$defs/t", "allOf": [True, False], "$defs": {"t": True}}, "allOf.1"),
    "dynamic": ({"$dynamicRef": "#/$defs/no", "$defs": {"no": False}}, "$dynamicRef"),
    "list of items": (
        {"$schema": DRAFT_7, "type": "array", "minItems": 2, "items": [True, EMPTY]},
        "items.1.minimum",
    ),
    "after a list of items": (
        {"$schema": DRAFT_7, "type": "array", "minItems": 2, "items": [True], "additionalItems": EMPTY},
        "additionalItems.minimum",
    ),
    "spelled out": (
        {**REQUIRED, "patternProperties": {"^a$": False}},
        "patternProperties.^a$",
    ),
    "spelled out with a property": (
        {**REQUIRED, "properties": {"a": NUMBER}, "patternProperties": {"^a$": EMPTY}},
        "patternProperties.^a$.minimum",
    ),
    "led to in what is no keyword": (
        {"x-own": {"y": {"items": {"format": "x"}}}, "$ref": "#/x-own/y"},
        "x-own.y.items.format",
    ),
    "a caller's comment": ({"$comment": "@no.place", "properties": {"a": 5}}, "properties.a"),
    "a comment like ours": ({"$comment": "@[[5, 5], 5]", "properties": {"a": 5}}, "properties.a"),
    "unrolled": (
        {
            "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n", "required": ["v"]}, "v": EMPTY}}},
            "type": "object",
            "required": ["v"],
            "$ref": "#/$defs/n",
        },
        "required",
    ),
    "unrolled, false": (
        {
            "$defs": {
                "no": False,
                "n": {
                    "type": "object",
                    "properties": {"n": {"$ref": "#/$defs/n", "required": ["v"]}, "v": {"$ref": "#/$defs/no"}},
                },
            },
            "type": "object",
            "required": ["v"],
            "$ref": "#/$defs/n",
        },
        "$defs.n.properties",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_is_one_of_the_schema(name: str) -> None:
    schema, place = PLACES[name]
    error = refused({"json_schema": schema})
    assert error.field == f"structure.{place}", error.message
    assert exists(schema, place)
    assert "allOf" in json.dumps(schema) or "allOf" not in error.message


@pytest.mark.parametrize("name", PLACES)
def test_a_schema_made_flat_twice_keeps_its_places(name: str) -> None:
    """As of tools, which stand in a grammar."""
    schema, place = PLACES[name]
    try:
        flat = FlatSchema(schema, "structure").whole
    except TurnoutError as early:
        assert early.field == f"structure.{place}"
        return
    error = refused({"grammar": f"start: %json {json.dumps(flat)}"})
    assert exists(schema, (error.field or "").removeprefix("structure.")), error.message
    assert error.field == f"structure.{place}"


def circle(count: int) -> dict[str, Any]:
    """Definitions each of which leads to the next, with a keyword next to it, the last to the first."""
    return {str(at): {"$ref": f"#/$defs/{(at + 1) % count}", "type": "object"} for at in range(count)}


def test_a_long_circle_of_references_is_refused_where_it_leads_on() -> None:
    schema = {"$defs": circle(701), "type": "object", "properties": {"a": {"$ref": "#/$defs/0"}}}
    error = refused({"json_schema": schema})
    place = (error.field or "").removeprefix("structure.")
    assert place.endswith("$ref")
    assert exists(schema, place)
    assert f"more than {MOST_UNROLLED} references" in error.message


@pytest.mark.parametrize("form", [{}, {"x-guidance": {"whitespace_flexible": True}}])
@pytest.mark.parametrize("levels", [MAX_EMBEDDED_DEPTH, 400])
def test_a_schema_in_a_grammar_is_refused_where_it_is_too_deep(levels: int, form: dict[str, Any]) -> None:
    error = refused({"grammar": f"start: %json {json.dumps({**form, **nested(levels)})}"})
    assert f"nested too deeply: a schema in a grammar has at most {MAX_EMBEDDED_DEPTH} levels" in error.message
    place = (error.field or "").removeprefix("structure.")
    assert place.startswith("items.items.")
    assert exists(nested(levels), place)


def test_a_value_in_a_grammar_is_refused_where_it_is_too_deep() -> None:
    value = "[" * 400 + "]" * 400
    assert (refused({"grammar": f'start: %json {{"const": {value}}}'}).field or "").startswith("structure.const.0.0")


def test_what_a_schema_may_be_it_may_be_in_a_grammar() -> None:
    schema = nested(MAX_DEPTH - 1)
    for structure in ({"json_schema": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        assert fits(byte_compiler(), Structure.model_validate(structure), "[[[]]]")


def test_drafts_before_2019_read_nothing_next_to_a_reference() -> None:
    given = {"definitions": {"a": NUMBER}, "$ref": "#/definitions/a", "type": "string", "not": {}, "format": "x"}
    made = Structure.model_validate({"json_schema": {"$schema": DRAFT_7, **given}})
    assert [fits(byte_compiler(), made, text) for text in ("3", '"x"')] == [True, False]
    assert refused({"json_schema": given}).field == "structure.format"


def test_what_is_ignored_may_be_led_to() -> None:
    inner: dict[str, Any] = {
        "a": {"$ref": "#/properties/b", "items": {"type": "boolean"}},
        "b": {"$ref": "#/properties/a/items"},
    }
    made = Structure.model_validate({"json_schema": {"$schema": DRAFT_6, "type": "object", "properties": inner}})
    values = ({"a": True}, {"a": 1}, {"b": True}, {"b": [True]})
    assert [fits(byte_compiler(), made, json.dumps(value)) for value in values] == [True, False, True, False]
    inner["a"]["items"] = {"format": "x"}
    assert refused({"json_schema": {"$schema": DRAFT_6, "properties": inner}}).field == (
        "structure.properties.a.items.format"
    )


@pytest.mark.parametrize("keyword", ["propertyNames", "unevaluatedItems", "unevaluatedProperties"])
@pytest.mark.parametrize("value", [True, {}, {"description": "any"}])
def test_keywords_that_allow_everything_are_taken(keyword: str, value: Any) -> None:
    assert fits(byte_compiler(), Structure.model_validate({"json_schema": {"type": "null", keyword: value}}), "null")


@pytest.mark.parametrize("value", [False, {"maxLength": 1, "pattern": "a"}, {"$ref": "#"}, {"not": {}}])
def test_keywords_that_do_not_are_refused(value: Any) -> None:
    assert refused({"json_schema": {"type": "null", "propertyNames": value}}).field == "structure.propertyNames"


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("dependentSchemas", {"a": {}}), ("dependentRequired", {"a": []}), ("dependencies", {"a": [], "b": True})],
)
def test_dependencies_of_nothing_are_taken(keyword: str, value: Any) -> None:
    assert fits(byte_compiler(), Structure.model_validate({"json_schema": {"type": "null", keyword: value}}), "null")
