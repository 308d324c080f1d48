"""Keywords that the library does not follow and others stand for: against `jsonschema`, value by value."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from decoding.grammars.flat_schemas import FlatSchema
from tests.constrained import byte_compiler, fits
from tests.decoding.test_json_schemas import judge
from tests.decoding.test_schema_refusals import refused
from turnout.errors import TurnoutError
from turnout.structure import Structure

TEXT: dict[str, Any] = {"type": "string"}
BASE = {"properties": {"a": TEXT}, "patternProperties": {"^p": {"type": "null"}}}
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
OBJECTS = [
    {},
    {"a": "x"},
    {"a": 1},
    {"b": 1},
    {"a": "x", "b": 1},
    {"a": "x", "p1": None},
    {"a": "x", "p1": 1},
    {"q": 1},
    3,
]
ARRAYS = [[], ["x"], [1], ["x", 1], ["x", "y"], ["x", 1, 2], ["x", None], "x"]
CLOSED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "alone": ({"unevaluatedProperties": False}, OBJECTS),
    "with a schema": ({"properties": {"a": TEXT}, "unevaluatedProperties": {"type": "integer"}}, OBJECTS),
    "next to additionalProperties": (
        {"additionalProperties": {"type": "integer"}, "unevaluatedProperties": False},
        OBJECTS,
    ),
    "through allOf": ({"allOf": [BASE], "properties": {"b": True}, "unevaluatedProperties": False}, OBJECTS),
    "through a reference": (
        {"$ref": "#/$defs/base", "$defs": {"base": BASE}, "properties": {"b": True}, "unevaluatedProperties": False},
        OBJECTS,
    ),
    "through both, twice": (
        {
            "allOf": [{"$ref": "#/$defs/base"}, {"allOf": [{"properties": {"b": True}}]}],
            "unevaluatedProperties": False,
            "$defs": {"base": BASE},
        },
        OBJECTS,
    ),
    "an inner one that is open": (
        {"allOf": [{"properties": {"a": TEXT}, "unevaluatedProperties": True}], "unevaluatedProperties": False},
        OBJECTS,
    ),
    "an inner one that sees less": (
        {"allOf": [{"properties": {"a": TEXT}, "unevaluatedProperties": False}], "properties": {"b": True}},
        OBJECTS,
    ),
    "next to what says nothing of properties": (
        {"anyOf": [{"type": "object"}, {"type": "integer"}], **BASE, "unevaluatedProperties": False},
        OBJECTS,
    ),
    "of a schema that leads to itself": (
        {"properties": {"a": {"$ref": "#"}}, "unevaluatedProperties": False},
        [{}, {"a": {}}, {"a": {"a": {}}}, {"b": {}}, {"a": {"b": {}}}],
    ),
    "of one schema, twice": (
        {
            "allOf": [{"$ref": "#/$defs/base"}],
            "anyOf": [{"$ref": "#/$defs/base"}, {"type": "integer"}],
            "unevaluatedProperties": False,
            "$defs": {"base": BASE},
        },
        OBJECTS,
    ),
    "items, alone": ({"unevaluatedItems": False}, ARRAYS),
    "items, of a schema": ({"prefixItems": [TEXT], "unevaluatedItems": {"type": "integer"}}, ARRAYS),
    "items, next to items": ({"items": TEXT, "unevaluatedItems": False}, ARRAYS),
    "items, through allOf": ({"allOf": [{"prefixItems": [TEXT, True]}], "unevaluatedItems": False}, ARRAYS),
    "items, and first ones of its own": (
        {"allOf": [{"prefixItems": [True, {"type": "integer"}]}], "prefixItems": [TEXT], "unevaluatedItems": False},
        ARRAYS,
    ),
    "items, all of them": ({"allOf": [{"prefixItems": [TEXT], "items": True}], "unevaluatedItems": False}, ARRAYS),
    "items of 2019": ({"$schema": DRAFT_2019, "items": [TEXT], "unevaluatedItems": False}, ARRAYS),
    "items of 2019, all of them": (
        {"$schema": DRAFT_2019, "items": [TEXT], "additionalItems": {"type": "integer"}, "unevaluatedItems": False},
        ARRAYS,
    ),
}
NAMED = [{}, {"a": 1}, {"b": 1}, {"b": 1, "a": 1}, {"b": 1, "a": 1, "c": 2}, {"c": 1}, "x", [1]]
DEPENDENT: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "names": ({"dependentRequired": {"a": ["b"]}}, NAMED),
    "names, of two": (
        {"dependentRequired": {"a": ["b"], "b": ["c"]}},
        [*NAMED, {"c": 1, "b": 1}],
    ),
    "names, itself": ({"dependentRequired": {"a": ["a"]}, "type": "object"}, NAMED),
    "names that are listed": (
        {"properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}, "dependentRequired": {"a": ["b"]}},
        [*NAMED, {"b": "x"}],
    ),
    "a schema": ({"dependentSchemas": {"a": {"properties": {"b": {"const": 2}}}}}, [*NAMED, {"b": 2, "a": 1}]),
    "no schema": ({"dependentSchemas": {"a": False, "b": True}}, NAMED),
    "draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
        [*NAMED, {"c": 1, "b": 1}],
    ),
    "contains, no time": ({"contains": {"const": 1}, "minContains": 0}, [[], [1], [2]]),
}
LETTERS = [{}, {"a": 1}, {"ab": 1}, {"b": 1}, {"a": 1, "ab": 2}, {"a": "x"}, {"abc": 1}, {"": 1}, "x"]
NAMES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "a pattern": ({"propertyNames": {"pattern": "^a"}}, LETTERS),
    "a pattern, and properties": (
        {"properties": {"a": {"type": "integer"}, "b": True}, "propertyNames": {"pattern": "^a", "type": "string"}},
        LETTERS,
    ),
    "a pattern, and what is in others": (
        {"additionalProperties": {"type": "integer"}, "propertyNames": {"pattern": "^a"}},
        LETTERS,
    ),
    "lengths": ({"propertyNames": {"minLength": 1, "maxLength": 2}}, LETTERS),
    "at most so long": ({"propertyNames": {"maxLength": 1}, "additionalProperties": {"type": "integer"}}, LETTERS),
    "no length": ({"propertyNames": {"minLength": 2, "maxLength": 1}}, LETTERS),
    "a list": ({"propertyNames": {"enum": ["a", "ab", 3]}}, LETTERS),
    "any": ({"propertyNames": {"type": "string"}, "minProperties": 1}, LETTERS),
    "of any length": ({"propertyNames": {"maxLength": 10**30}, "required": ["a"]}, LETTERS),
    "one": ({"propertyNames": {"const": "a"}, "type": "object"}, LETTERS),
}
ALL = {**CLOSED, **DEPENDENT, **NAMES}


@pytest.mark.parametrize("name", ALL)
def test_values_fit_that_fit_for_jsonschema(name: str) -> None:
    schema, values = ALL[name]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    expected = [kind(schema).is_valid(value) for value in values]
    assert any(expected)
    made = Structure.model_validate({"json_schema": schema})
    assert [fits(byte_compiler(), made, json.dumps(value)) for value in values] == expected


@pytest.mark.parametrize("seed", range(3))
def test_texts_of_mixed_keywords_are_valid(seed: int) -> None:
    """What is drawn from several at once, side by side and one in the other."""
    draw, schemas = random.Random(seed), [schema for schema, _ in ALL.values() if "$schema" not in schema]
    taken = 0
    for _ in range(40):
        one, two = draw.sample(schemas, 2)
        taken += judge(draw.choice([{**one, **two}, {"allOf": [one], **two}, {"properties": {"a": one}, **two}]), draw)
    assert taken >= 10


@pytest.mark.parametrize(
    ("schema", "place", "said"),
    [
        ({"anyOf": [BASE, True], "unevaluatedProperties": False}, "unevaluatedProperties", "depend on the value"),
        ({"contains": TEXT, "minContains": 0, "unevaluatedItems": False}, "unevaluatedItems", "depend on the value"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedItems": False},
            "unevaluatedItems",
            "2019-09",
        ),
        ({"contains": TEXT, "minContains": 0, "maxContains": 1}, "contains", "is not supported"),
        ({"propertyNames": {"format": "email"}}, "propertyNames", "a pattern"),
        ({"dependentRequired": {str(each): ["a"] for each in range(7)}}, "dependentRequired", "up to 6 names"),
        ({"dependentRequired": {"a": [1]}}, "dependentRequired", "must be an object of lists of texts"),
        ({"dependencies": {"a": {"not": {}}}}, "dependencies.a.not", "is not supported"),
        ({"dependentSchemas": {"a": {"not": {}}}}, "dependentSchemas.a.not", "is not supported"),
        (
            {
                "allOf": [{"properties": {"a": TEXT}}],
                "required": ["b"],
                "type": "object",
                "unevaluatedProperties": False,
            },
            "",
            "no value fits",
        ),
    ],
)
def test_what_cannot_be_written_otherwise_is_refused(schema: dict[str, Any], place: str, said: str) -> None:
    error = refused({"json_schema": schema})
    assert said in error.message
    assert (error.field or "").startswith(f"structure.{place}")


def chain(count: int, times: int = 1, **others: Any) -> dict[str, Any]:
    """A reference to the first of some definitions, each of which leads to the next one that many times."""
    made = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * times, **others} for at in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**made, str(count): BASE}, "unevaluatedProperties": False}


@pytest.mark.parametrize("schema", [chain(400), chain(40, times=3)])
def test_long_ways_to_what_is_evaluated_are_walked_once(schema: dict[str, Any]) -> None:
    made = FlatSchema(schema, "structure").whole
    assert made["additionalProperties"] is False
    assert made["properties"].keys() == {"a"}


def test_more_ways_than_can_be_walked_are_refused() -> None:
    with pytest.raises(TurnoutError, match="structure: is too large"):
        FlatSchema(chain(300, unevaluatedProperties=False), "structure")
