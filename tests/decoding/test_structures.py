"""What a caller may ask for as a structure, before anything is compiled."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from decoding.structures import check, checked_structure, short_form
from turnout.errors import TurnoutError
from turnout.structure import MAX_CHARS, MAX_CHOICES, MAX_DEPTH, MAX_NODES, Structure
from turnout.types import SamplingParams


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ({"json_object": True}, "json_object", "true"),
        ({"json_schema": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"kind": "regex", "value": "a"}, "regex", "a"),
        ({"kind": "json_object", "value": "true"}, "json_object", "true"),
    ],
)
def test_short_and_long_forms(given: dict[str, Any], kind: str, value: str) -> None:
    made = checked_structure(given, "")
    assert (made.kind, made.value) == (kind, value)
    assert checked_structure(short_form(made), "") == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(Structure(kind=made.kind, value=made.value))
    assert SamplingParams.model_validate(SamplingParams(structure=made).model_dump()).structure == made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of choice, grammar, json_object"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"xml": "a"}, "exactly one of"),
        ({"regex": ""}, "must not be empty"),
        ({"regex": 5}, "must be a text"),
        ({"regex": ["a"]}, "must be a text"),
        ({"json_object": False}, "must be true"),
        ({"kind": "json_object", "value": "x"}, "must be true"),
        ({"kind": "tools", "value": "{}"}, "exactly one of"),
        ({"kind": "regex"}, "must not be empty"),
        ({"kind": "json_schema"}, "must not be empty"),
        ({"kind": ["regex"], "value": "a"}, "exactly one of"),
        ({"kind": "regex", "value": "a", "more": 1}, "unknown"),
        ({"regex": "a", "more": 1}, "exactly one of"),
        ({"choice": []}, "list of texts"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"choice": ["a", 1]}, "list of texts"),
        ({"choice": [str(n) for n in range(MAX_CHOICES + 1)]}, f"at most {MAX_CHOICES}"),
        ({"json_schema": []}, "must be an object"),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": "[" * 100_000}, "too large"),
        ({"json_schema": "[" * 60_000}, "nested too deeply"),
        ({"json_schema": nested(MAX_DEPTH + 1)}, "nested too deeply"),
        ({"json_schema": {"enum": list(range(MAX_NODES + 1))}}, f"more than {MAX_NODES} values"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"at most {MAX_CHARS}"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TurnoutError, match="structure") as refused:
        checked_structure(given, "structure")
    assert said in refused.value.message
    assert len(refused.value.message) < 1000


def test_an_object_without_a_value_is_the_same_object() -> None:
    made = checked_structure({"kind": "json_object"}, "")
    assert made == checked_structure({"kind": "json_object", "value": ""}, "") == Structure(kind="json_object")
    assert short_form(made) == {"json_object": True}


def test_what_is_just_small_enough_is_taken() -> None:
    check(Structure.model_validate({"json_schema": nested(MAX_DEPTH // 2 - 1)}))
    check(Structure.model_validate({"json_schema": {"enum": list(range(MAX_NODES - 2))}}))
    check(Structure.model_validate({"choice": [str(n) for n in range(MAX_CHOICES)]}))
    assert json.loads(Structure.model_validate({"json_schema": True}).value) is True
