"""What bodies and messages say of an answer's form, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.structures import short_form
from deployments.grpc_messages import generate_call, spelling
from deployments.schemas import chat_job, completion_job
from turnout.client_messages import generate_request
from turnout.errors import TurnoutError
from turnout.proto import generation_pb2 as pb
from turnout.structure import Structure

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES = [{"role": "user", "content": "x"}]


def asked(**body: Any) -> Structure | None:
    chat = chat_job({"messages": MESSAGES, **body}).calls[0].sampling.structure
    assert completion_job({"prompt": "x", **body}).calls[0].sampling.structure == chat
    return chat


def test_response_formats() -> None:
    assert asked() is None
    assert asked(response_format={"type": "text"}) is None
    assert asked(response_format={"type": "json_object"}) == Structure(kind="json_object")
    given = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    assert asked(response_format=given) == Structure.model_validate({"json_schema": SCHEMA})


@pytest.mark.parametrize(
    "short",
    [
        {"regex": "[0-9]+"},
        {"grammar": 'start: "a"'},
        {"choice": ["yes", "no"]},
        {"json_object": True},
        {"json_schema": SCHEMA},
        {"span": "a text, and its parts"},
    ],
    ids=lambda short: next(iter(short)),
)
def test_the_same_structure_over_every_way(short: dict[str, Any]) -> None:
    expected = Structure.model_validate(short)
    assert asked(decoding={"structure": short}) == expected
    sent = generate_request("x", None, {"structure": short})
    read = generate_call(pb.GenerateRequest.FromString(sent.SerializeToString()))
    assert read.sampling.structure == expected


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"kind": "json_object"}, "json_object"),
        ({"kind": "json_object", "value": "true"}, "json_object"),
        ({"kind": "choice", "value": '["yes", "no"]'}, "choice"),
        ({"choice": '["yes", "no"]'}, "choice"),
        ({"choice": ("yes", "no")}, "choice"),
        ({"kind": "json_schema", "value": "true"}, "json_schema"),
        ({"span": "a text"}, "other"),
    ],
)
def test_a_kind_goes_into_its_own_field_for_servers_that_know_no_other(given: dict[str, Any], field: str) -> None:
    sent = generate_request("x", None, {"structure": given})
    assert sent.structure.WhichOneof("kind") == field
    assert list(sent.structure.choice.texts) == (["yes", "no"] if field == "choice" else [])
    made = generate_call(sent).sampling.structure
    assert made is not None
    assert short_form(made) == short_form(Structure.model_validate(given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": ["a", "b"]}, "must be a text"),
        ({"grammar": True}, "must be a text"),
        ({"kind": "regex"}, "must not be empty"),
        ({"kind": "tools", "value": "{}"}, "exactly one of choice"),
        ({"xml": "a"}, "exactly one of choice"),
        ({"json_object": False}, "must be true"),
        ({"choice": []}, "list of texts"),
        ({"choice": "a"}, "no JSON"),
    ],
)
def test_the_client_and_its_server_refuse_what_http_does(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TurnoutError, match=said):
        generate_call(generate_request("x", None, {"structure": given}))
    with pytest.raises(TurnoutError, match=said):
        asked(decoding={"structure": given})


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is needed"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
            "",
        ),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "needs type"),
        ({"decoding": {"structure": {"regex": "a", "choice": ["b"]}}}, "decoding.structure", "exactly one"),
        ({"decoding": {"structure": {"regex": ""}}}, "decoding.structure", "must not be empty"),
        (
            {"decoding": {"structure": {"regex": "a"}}, "response_format": {"type": "json_object"}},
            "decoding.structure",
            "conflicts",
        ),
        ({"structure": {"regex": "a"}}, "structure", "unknown"),
    ],
)
def test_bad_bodies_are_refused_by_name(body: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(TurnoutError) as refused:
        chat_job({"messages": MESSAGES, **body})
    assert (refused.value.field or "").startswith(field)
    assert said in refused.value.message


def test_bad_messages_are_refused_by_name() -> None:
    request = pb.GenerateRequest(prompt="x", structure=pb.Structure())
    with pytest.raises(TurnoutError, match="exactly one") as refused:
        generate_call(request)
    assert refused.value.field == "structure"
    with pytest.raises(TurnoutError, match="list of texts"):
        generate_call(pb.GenerateRequest(prompt="x", structure=pb.Structure(choice=pb.Structure.Choice())))
    assert spelling(request)["structure"] == "structure"


def test_who_named_the_structure_is_told_in_its_own_words() -> None:
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    assert chat_job(body).spelling["structure"] == "response_format"
    body = {"messages": MESSAGES, "decoding": {"structure": {"regex": "a"}}}
    assert chat_job(body).spelling["structure"] == "decoding.structure"
    body = {"messages": MESSAGES, "decoding": {"structure": {"json_schema": SCHEMA}}}
    assert chat_job(body).spelling["structure"] == "decoding.structure.json_schema"
