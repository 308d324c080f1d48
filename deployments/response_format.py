"""What a body says of the form of its answer: `response_format`, `decoding.structure`, tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from decoding.structures import checked_structure
from deployments.openai_format import ChatFormat, DetailedFormat, Format
from deployments.request_fields import BodyPart
from deployments.tools import ToolChatFormat, reader_of
from turnout.calls import GenerateCall
from turnout.errors import invalid
from turnout.structure import Structure


class SchemaFormat(BodyPart):
    """`response_format.json_schema`; every schema is followed strictly."""

    name: Annotated[str, Field(max_length=64, description="accepted and ignored")] = ""
    description: Annotated[str | None, Field(description="accepted and ignored")] = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="accepted and ignored: answers fit either way")] = None


class ResponseFormat(BodyPart):
    """`response_format`: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


def structure_of(form: ResponseFormat | None, own: dict[str, Any] | None) -> tuple[Structure | None, str]:
    """The structure a body asks for, and the field that does.

    Args:
        form: `response_format`.
        own: `decoding.structure`.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    if own is not None:
        if form is not None and form.type != "text":
            raise invalid("decoding.structure", "conflicts with response_format; give one of them")
        where = "decoding.structure.json_schema" if "json_schema" in own else "decoding.structure"
        return checked_structure(own, "decoding.structure"), where
    if form is None or form.type == "text":
        if form is not None and form.json_schema is not None:
            raise invalid("response_format.json_schema", 'needs type "json_schema"')
        return None, "response_format"
    if form.type == "json_object":
        if form.json_schema is not None:
            raise invalid("response_format.json_schema", 'needs type "json_schema"')
        return Structure(kind="json_object"), "response_format"
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise invalid("response_format.json_schema.schema", "is needed")
    where = "response_format.json_schema.schema"
    return checked_structure({"json_schema": form.json_schema.schema_}, where), where


def format_of(form: Format, call: GenerateCall) -> Format:
    """Return the format of a call's answers: its endpoint's, with tool calls and token details where it asks for them.

    Args:
        form: of the endpoint.
        call: any call of the request; all ask for the same.
    """
    reader = reader_of(call)
    if reader is not None and isinstance(form, ChatFormat):
        form = ToolChatFormat(form, reader)
    return DetailedFormat(form) if call.sampling.token_details else form
