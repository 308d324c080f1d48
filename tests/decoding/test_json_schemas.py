"""JSON schemas: what is accepted gives values that `jsonschema` accepts, what is refused is named with its place."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from decoding.grammars.flat_schemas import FlatSchema
from decoding.grammars.keywords import LARGEST
from decoding.grammars.matcher import GrammarConstraint
from tests.constrained import allowed_ids, byte_compiler, byte_tokenizer_once, exists, fits
from turnout.errors import Code, TurnoutError
from turnout.structure import Structure

STEPS = 80
MANY = 40
OPEN: Any = {}
# Values of each keyword: usual, odd, and of wrong types.
VALUES: dict[str, list[Any]] = {
    "$anchor": ["A", 5],
    "$comment": ["x"],
    "$defs": [{"a": {"type": "null"}}, {"a": {"$anchor": "A", "type": "boolean"}}, {"a": 5}, 5],
    "$dynamicAnchor": ["A", 5],
    "$dynamicRef": ["#A", "#", 5],
    "$id": ["x", "https://x.org/y/", "#x", 5],
    "$recursiveRef": ["#", "x"],
    "$ref": ["#", "#/$defs/a", "#A", "x", "x#A", "https://x.org/y/", "http://[", "#/properties/a",
             "#/$defs/a/type", ""],
    "$schema": ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema", "x", 5],
    "additionalItems": [False, OPEN],
    "additionalProperties": [False, True, {"type": "null"}, 5],
    "allOf": [[{"type": "integer"}], [{"required": ["a"]}, {"properties": {"a": {"type": "null"}}}], [False], [], 5],
    "anyOf": [[{"type": "integer"}, {"maxLength": 2}], [True, False], [{"const": 1}, {"$ref": "#/$defs/a"}], [], [5]],
    "const": [1, "a", None, {"a": [1]}, 2**53 + 1, -(2**63), 10**30, 10**400, 1e300, 0.5, -0.0],
    "contains": [OPEN],
    "contentEncoding": ["base64"],
    "default": [1],
    "definitions": [{"a": OPEN}, 5],
    "dependencies": [{}, {"a": ["b"]}, {"a": {"minProperties": 2}, "b": ["a"]}, {"a": 5}, 5],
    "dependentRequired": [{}, {"a": ["b"]}, {"a": ["b", "a"], "b": []}, {"a": 5}, 5],
    "dependentSchemas": [{}, {"a": OPEN}, {"a": {"required": ["b"]}}, {"a": {"not": OPEN}}, {"a": False}],
    "enum": [[1, "a", None], [], ["a", "a"], 5, [[], {}], [10**20]],
    "exclusiveMaximum": [3, True, "3"],
    "exclusiveMinimum": [0, True, None],
    "format": ["date", "ipv4", "uuid", "date-time", "regex", "x", 5],
    "if": [OPEN],
    "then": [{"type": "null"}],
    "items": [False, {"type": "null"}, [{"type": "null"}], 5],
    "maxContains": [1],
    "maxItems": [0, 2, 1.0, 10**400, -1, 1.5, "2"],
    "maxLength": [0, 2, 10**12, -1],
    "maxProperties": [0, 1, 10**12, True],
    "maximum": [3, -1.5, 10**20, 10**400, 2**63 - 1, "3"],
    "minContains": [1, 0],
    "minItems": [0, 2, 10**12, 1.5],
    "minLength": [0, 2, 10**12],
    "minProperties": [0, 1, 2, 10**12],
    "minimum": [1, -(2**63), 10**20, 1e-30, LARGEST, "1"],
    "multipleOf": [2, 0.5, 0, -1, 1e-12, 10**12, 10**400],
    "not": [False, OPEN],
    "oneOf": [[{"type": "integer"}, {"type": "string", "maxLength": 2}], [OPEN, OPEN], [], 5],
    "pattern": ["^a", "b$", "^[0-9]{2}$", "(?=a)", r"(a)\1", "(", r"\bx", "a{99999}", 5],
    "patternProperties": [{"^a$": {"type": "integer"}}, {"": {"type": "null"}}, {"^[ab]$": OPEN, "^a": {}},
                          {"(": OPEN}],
    "prefixItems": [[{"type": "null"}], [False], [], OPEN],
    "properties": [{"a": {"type": "integer"}}, {"a": False}, {"a": {"$ref": "#"}}, {"a": 5}, 5],
    "propertyNames": [True, OPEN, {"maxLength": 1}, {"minLength": 1}, {"pattern": "^a"}, {"enum": ["a", 1]},
                      {"const": "b"}, {"pattern": "("}, {"type": "null"}],
    "required": [["a"], [], ["a", "b"], [5], True],
    "title": ["x"],
    "type": ["string", "object", "array", "integer", ["number", "null"], "any", [], ["null", "null"], 5],
    "unevaluatedItems": [True, OPEN, False, {"type": "null"}],
    "unevaluatedProperties": [True, OPEN, False, {"type": "null"}],
    "uniqueItems": [False, True],
    "x-unknown": [{"$ref": 5}],
}  # fmt: skip
INTERNALS = re.compile(
    r"NoExtension|verbose|Unimplemented|json-schema:|Some\(|None\b|Regex|Unsatisfiable|fuel|\blex|grammar|llguid|coerce"
    r"|Error\b|Exception|usize|f64|<class|object at|lenient|/\(|Unresolvable|\n",
)


def compiled(schema: Any) -> GrammarConstraint:
    return byte_compiler().compile(Structure.model_validate({"json_schema": schema})).clone()


def text_of(constraint: GrammarConstraint, draw: random.Random) -> str | None:
    """A text that the constraint lets through, the end chosen where it may be; None where it becomes long."""
    [end], answer = constraint.end_ids, list[int]()
    while len(answer) < STEPS:
        ids = allowed_ids(constraint, answer)
        assert not constraint.failure, bytes(answer)
        assert ids
        if end in ids and (len(ids) == 1 or draw.random() < 0.5):
            assert constraint.accepts(answer)
            return str(byte_tokenizer_once().decode(answer))
        ids = [each for each in ids if each != end]
        closing = [each for each in ids if chr(each) in '"}],:ab0']
        answer.append(draw.choice(closing if closing and draw.random() < 0.8 else ids))
    return None


def judge(schema: Any, draw: random.Random) -> bool:
    """Whether a schema is accepted; what is made of it, or said of it, is right either way."""
    try:
        constraint = compiled(schema)
    except TurnoutError as refused:
        check_refusal(schema, refused)
        return False
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    is_valid = is_schema(kind, schema)
    for _ in range(2):
        text = text_of(constraint, draw)
        if text is not None and is_valid:
            kind(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
    return True


def is_schema(kind: Any, schema: Any) -> bool:
    """False for some that are taken in an older draft's spelling, which `jsonschema` does not judge."""
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


def check_refusal(schema: Any, refused: TurnoutError) -> None:
    assert refused.code is Code.INVALID_ARGUMENT
    field = refused.field or ""
    words = refused.message.removeprefix(f"{field}: ")
    for value in re.findall(r"\(got .*\)|^\".*?\" ", words):
        words = words.replace(value, "")
    assert not INTERNALS.search(words), refused.message
    if schema is False:
        return
    path = field.removeprefix("structure").lstrip(".")
    assert path, refused.message
    assert exists(schema, path), refused.message


@pytest.mark.parametrize("keyword", VALUES)
def test_each_keyword_with_each_value(keyword: str) -> None:
    draw = random.Random(keyword)
    for value in VALUES[keyword]:
        for around in ({}, {"type": "object"}, {"type": "array"}, {"type": ["string", "integer"]}):
            judge({**around, keyword: value}, draw)


def pairs(draw: random.Random) -> list[dict[str, Any]]:
    return [
        {one: draw.choice(VALUES[one]), other: draw.choice(VALUES[other]), **draw.choice([{}, {"type": "object"}])}
        for one, other in itertools.permutations(VALUES, 2)
    ]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exactness) for seed in range(1, MANY))])
def test_pairs_of_keywords(seed: int) -> None:
    draw = random.Random(seed)
    made = draw.sample(pairs(draw), 250)
    accepted = [judge(schema, draw) for schema in made]
    assert 0.1 < sum(accepted) / len(made) < 0.9


BOOLEAN = {"type": "boolean"}
TREE = {
    "$id": "https://x.org/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"data": True, "inner": {"type": "array", "items": {"$dynamicRef": "#node"}}},
    "required": ["data"],
    "additionalProperties": False,
}
REFERENCES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "anchor": (
        {"$defs": {"p": {"$anchor": "P", **BOOLEAN}}, "properties": {"a": {"$ref": "#P"}}, "required": ["a"]},
        [{"a": True}, {"a": 1}],
    ),
    "identifier": ({"$defs": {"p": {"$id": "p", **BOOLEAN}}, "$ref": "p"}, [True, 1]),
    "identifier and anchor": (
        {"$defs": {"p": {"$id": "p", "$defs": {"q": {"$anchor": "Q", **BOOLEAN}}}}, "$ref": "p#Q"},
        [True, 1],
    ),
    "nested base": (
        {
            "$id": "https://x.org/a/b",
            "$defs": {"p": {"$id": "c/", "$defs": {"q": {"$id": "d", **BOOLEAN}}, "items": {"$ref": "d"}}},
            "properties": {"a": {"$ref": "c/"}, "b": {"$ref": "https://x.org/a/c/d"}},
        },
        [{"a": [True]}, {"a": [1]}, {"b": True}, {"b": 1}],
    ),
    "pointer of an embedded resource": (
        {
            "$defs": {"p": {"$id": "p", "$defs": {"q": BOOLEAN}, "$ref": "#/$defs/q"}, "q": {"type": "null"}},
            "$ref": "p",
        },
        [True, None],
    ),
    "pointer with escapes": ({"$defs": {"a/b~%é": BOOLEAN}, "$ref": "#/$defs/a~1b~0%25%C3%A9"}, [True, 1]),
    "pointer not encoded": ({"$defs": {"é x": BOOLEAN}, "$ref": "#/$defs/é x"}, [True, 1]),
    "pointer through lists": (
        {"prefixItems": [{}, BOOLEAN], "items": {"$ref": "#/prefixItems/1"}},
        [[1, True], [1, 1]],
    ),
    "definitions": ({"definitions": {"p": BOOLEAN}, "$ref": "#/definitions/p"}, [True, 1]),
    "chain": (
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#C"}, "c": {"$anchor": "C", **BOOLEAN}},
            "$ref": "#/$defs/a",
        },
        [True, 1],
    ),
    "siblings": ({"$defs": {"p": {"type": "integer", "minimum": 2}}, "$ref": "#/$defs/p", "maximum": 3}, [2, 1, 4]),
    "siblings of a recursive one": (
        {
            "properties": {"n": {"$ref": "#", "description": "the next"}},
            "additionalProperties": False,
            "type": "object",
        },
        [{"n": {"n": {}}}, {"n": {"n": 1}}],
    ),
    "siblings in a circle": (
        {
            "$defs": {"node": {"properties": {"v": True, "n": {"$ref": "#/$defs/node", "required": ["v"]}}}},
            "$ref": "#/$defs/node",
            "type": ["object", "null"],
            "properties": {"o": {"$ref": "#", "type": "object"}},
        },
        [
            {"o": {"v": 1, "o": {}}},
            {"o": None},
            {"v": 1, "n": {"v": 2, "n": {"v": 3}}},
            {"n": {"v": 2, "n": {}}},
            {"n": {}},
            None,
        ],
    ),
    "recursive through an anchor": (
        {"$anchor": "top", "type": ["object", "null"], "properties": {"n": {"$ref": "#top"}}, "required": ["n"]},
        [None, {"n": {"n": None}}, {"n": {"n": 1}}],
    ),
    "true and false": (
        {
            "$defs": {"t": True, "f": False},
            "prefixItems": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/f"}],
            "type": "array",
        },
        [[1], [1, 1]],
    ),
    "dynamic": (TREE, [{"data": 1, "inner": [{"data": 2}]}, {"data": 1, "inner": [{}]}, {"data": 1, "inner": [1]}]),
    "dynamic, extended": (
        {
            "$id": "https://x.org/strict",
            "$dynamicAnchor": "node",
            "$ref": "tree",
            "properties": {"data": BOOLEAN},
            "$defs": {"tree": TREE},
        },
        [{"data": True, "inner": [{"data": False}]}, {"data": True, "inner": [{"data": 1}]}, {"data": 1}],
    ),
    "recursive of 2019": (
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "type": "array", "items": {"$recursiveRef": "#"}},
        [[], [[], [[]]], [1]],
    ),
    "draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"p": {"$id": "#P", **BOOLEAN}},
            "items": [{"$ref": "#P"}],
            "additionalItems": {"$ref": "#/definitions/p"},
        },
        [[True], [1], [True, False], [True, 1]],
    ),
    "draft 7, with ignored siblings": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": {"type": "integer"}},
            "$ref": "#/definitions/a",
            "type": "string",
            "not": {},
        },
        [3, "x"],
    ),
    "draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "x",
            "definitions": {"p": BOOLEAN},
            "properties": {"a": {"$ref": "x#/definitions/p"}, "b": {"minimum": 3, "exclusiveMinimum": True}},
        },
        [{"a": True}, {"a": 1}, {"b": 3}, {"b": 4}],
    ),
    "names like keywords": (
        {"$defs": {"$ref": BOOLEAN}, "properties": {"$ref": {"$ref": "#/$defs/$ref"}}, "const": {"$ref": True}},
        [{"$ref": True}, {"$ref": 1}],
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_lead_where_they_lead_for_jsonschema(name: str) -> None:
    schema, values = REFERENCES[name]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    expected = [kind(schema).is_valid(value) for value in values]
    assert any(expected), "an example that nothing fits shows nothing"
    assert False in expected
    made = Structure.model_validate({"json_schema": schema})
    assert [fits(byte_compiler(), made, json.dumps(value)) for value in values] == expected


@pytest.mark.parametrize(
    ("schema", "place", "said"),
    [
        ({"properties": {"a": {"$ref": "#P"}}}, "properties.a.$ref", '"#P" leads to nothing'),
        ({"items": {"$ref": "#/$defs/a/b"}, "$defs": {"a": {}}}, "items.$ref", "leads to nothing"),
        ({"items": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}, "items.$ref", "fetched from elsewhere"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "file:///etc/passwd"}}}},
            "$defs.a.items.$ref",
            "file:",
        ),
        (
            {"properties": {"x.y": {"$ref": "#/required"}}, "required": []},
            'properties."x.y".$ref',
            "not lead to a schema",
        ),
        ({"allOf": [{"$dynamicRef": "#N"}]}, "allOf.0.$dynamicRef", "leads to nothing"),
        ({"$dynamicAnchor": "N", "$dynamicRef": "#N"}, "$dynamicRef", "infinite"),
        ({"$defs": {"p": {"$anchor": "P", "not": {}}}, "$ref": "#P"}, "$defs.p.not", "is not supported"),
        ({"properties": {"a": {"items": {"format": "x"}}}}, "properties.a.items.format", "date-time"),
        ({"items": {"pattern": "(?=a)"}}, "items.pattern", "look-around"),
        ({"patternProperties": {"^a": {}, "(": {}}}, "patternProperties.(", "unclosed group"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "patternProperties", "two patterns that may match one name"),
        ({"items": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}, "items.oneOf", "anyOf"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "properties.a", "no value fits it"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum", "no value fits it together with maximum"),
        ({"const": -(2**63)}, "const", f"numbers from {-LARGEST} to {LARGEST}"),  # it ended the library's process
        ({"enum": [{"a": [10**30]}]}, "enum", "numbers from"),
        ({"type": "object", "minProperties": 2}, "minProperties", "one more than required has names"),
        ({"prefixItems": {}}, "prefixItems", "a list of schemas"),
        (
            {"items": {"$schema": "http://json-schema.org/draft-04/schema#"}},
            "items.$schema",
            "draft of the whole schema",
        ),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema", "draft 4 and later"),
        ({"properties": {"a": 5}}, "properties.a", "must be a schema: an object, true or false (got 5)"),
    ],
)
def test_a_refusal_names_the_keyword_and_its_place(schema: Any, place: str, said: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        compiled(schema)
    check_refusal(schema, refused.value)
    assert refused.value.field == f"structure.{place}"
    assert said in refused.value.message


@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^a", "[ab]", "^[^\\s\\S]$"])
@pytest.mark.parametrize("others", [{}, {"additionalProperties": False}, {"additionalProperties": {"type": "null"}}])
def test_properties_and_patterns_of_the_same_names(pattern: str, others: dict[str, Any]) -> None:
    """Both hold, within one schema and across two; names that only a pattern could give are no dead end."""
    numbers, small = {"a": {"type": "integer"}}, {pattern: {"type": "integer", "maximum": 3}}
    draw = random.Random(pattern)
    for required in ([], ["a"]):
        base = {"type": "object", "properties": numbers, "required": required}
        own = {**base, "patternProperties": small, **others}
        in_list, apart = {"items": own, "type": "array"}, {"allOf": [base], "patternProperties": small, **others}
        for schema in (own, in_list, apart):
            values: list[Any] = [
                {"a": 3},
                {"a": 4},
                {"a": 1, "b": 2},
                {"a": 2, "b": 7},
                {"b": None},
                {"a": 1, "ab": 1},
                {},
            ]
            values = [[value] for value in values] if "items" in schema else values
            good = [value for value in values if jsonschema.Draft202012Validator(schema).is_valid(value)]
            if not judge(schema, draw):
                assert good == []
                continue
            made = Structure.model_validate({"json_schema": schema})
            assert [value for value in values if fits(byte_compiler(), made, json.dumps(value))] == good


def test_many_references_are_read_once_each() -> None:
    chain = {str(place): {"properties": {"n": {"$ref": f"#/$defs/{(place + 1) % 2000}"}}} for place in range(2000)}
    flat = FlatSchema({"$defs": chain, "$ref": "#/$defs/0"}, "it")
    assert len(flat.definitions) == 2000
    assert FlatSchema(flat.whole, "it").whole == flat.whole
