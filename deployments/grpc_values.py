"""Plain values in messages: JSON-like data as a Struct, and choices of parts."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf import struct_pb2

from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.proto import generation_pb2 as pb

LARGEST_EXACT_INTEGER = 2.0**53


def part_of(message: pb.Part, field: str) -> PartChoice:
    """Choice of a part, by its name."""
    return PartChoice(name=message.name, params=struct_values(message.params, field))


def struct_values(struct: struct_pb2.Struct, field: str) -> dict[str, Any]:
    """Plain data. A Struct knows doubles only: whole numbers become integers.

    Raises:
        TurnoutError: a number is not finite.
    """
    return {key: _plain(value, f"{field}.{key}") for key, value in struct.fields.items()}


def _plain(value: struct_pb2.Value, field: str) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise invalid(field, f"must be a finite number (got {number})")
            return int(number) if number.is_integer() and abs(number) <= LARGEST_EXACT_INTEGER else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return struct_values(value.struct_value, field)
        case "list_value":
            return [_plain(item, f"{field}.{place}") for place, item in enumerate(value.list_value.values)]
        case _:
            return None


def struct(values: dict[str, Any]) -> struct_pb2.Struct:
    """JSON-like data as a message."""
    message = struct_pb2.Struct()
    message.update(values)
    return message
