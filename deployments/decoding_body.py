"""The part of request bodies that says how to decode."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from decoding.structures import public_kinds
from deployments.request_fields import BodyPart
from turnout.part_choice import PartChoice
from turnout.types import MOST_PROCESSORS, RouteLimits


class Decoding(BodyPart):
    """Turnout's own part of a body: how to decode."""

    method: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    session: Annotated[str, Field(description="what the caller groups requests by, for routing")] = ""
    explain: Annotated[bool, Field(description="say in the usage why the request was routed as it was")] = False
    tokens: Annotated[bool, Field(description="report each token with its source, entropy and refused drafts")] = False
    candidates: Annotated[
        bool, Field(description="report in the usage what answers were chosen from, or a search found, with scores")
    ] = False
    parse_special: Annotated[
        bool,
        Field(description="whether special tokens that a raw prompt spells out are meant; in messages they never are"),
    ] = True
    limits: RouteLimits = RouteLimits()
    processors: Annotated[
        list[PartChoice],
        Field(max_length=MOST_PROCESSORS, description="logits processors", json_schema_extra={"x-slot": "processors"}),
    ] = Field(default_factory=list)
    contrast: Annotated[
        PartChoice | None,
        Field(
            description="streams that the logits are combined with: a name, or an object with one",
            json_schema_extra={"x-slot": "contrast"},
        ),
    ] = None
    context: Annotated[
        str,
        Field(
            description="text that the question is about; stands before the prompt or the last user message",
            json_schema_extra={"x-read-by": "contrast"},
        ),
    ] = ""
    uncertainty: Annotated[
        PartChoice | None,
        Field(
            description="what measures the doubt about each answer: a name, or an object with one",
            json_schema_extra={"x-slot": "uncertainty"},
        ),
    ] = None
    abstain_above: Annotated[
        FiniteFloat | None,
        Field(
            ge=-1e6,
            le=1e6,
            description="doubt above which an answer is not given; absent: the doubt is only reported",
            json_schema_extra={"x-read-by": "uncertainty"},
        ),
    ] = None
    structure: Annotated[
        dict[str, Any] | None, Field(description=f"what the text must fit: one of {', '.join(public_kinds())}")
    ] = None


def request_parts() -> dict[str, Any]:
    """JSON schema of the fields of `Decoding` that choose parts, or that these read.

    A field of a part has the key `x-slot`, and is a list where its type is array; one that a slot's parts read has
    `x-read-by`.
    """
    schema = Decoding.model_json_schema()
    chosen = {name: field for name, field in schema["properties"].items() if {"x-slot", "x-read-by"} & field.keys()}
    return {"type": "object", "properties": chosen, "$defs": {"PartChoice": schema["$defs"]["PartChoice"]}}
