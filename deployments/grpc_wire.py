"""Raw bytes in, messages out: the proxy passes requests on unparsed, so that a malformed one gets our answer.

Proxies import this module for `add_to_server`; keep it light.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2_grpc

from turnout.errors import TurnoutError, invalid
from turnout.proto import generation_pb2_grpc

M = TypeVar("M", bound=Message)
MAX_REQUEST_BYTES = 32 << 20
# What is taken before anybody looks at a key; a little more than our own limit, whose refusal says more.
MAX_MESSAGE_BYTES = MAX_REQUEST_BYTES + (8 << 20)
TOO_LARGE = b"\xff too large"  # no protobuf message
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class _Server(Protocol):
    def add_generic_rpc_handlers(self, handlers: Any) -> None: ...

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None: ...


class _Unparsed:
    """A server that registers every method with raw bytes as its request."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            handler._method_handlers = _unparsed(handler._method_handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(service, _unparsed(handlers))


def _unparsed(handlers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: handler._replace(request_deserializer=_bounded) for name, handler in handlers.items()}


def _bounded(data: bytes) -> bytes:
    """Runs in the proxy: what is too large to pass on becomes a message that says so."""
    return data if len(data) <= MAX_REQUEST_BYTES else TOO_LARGE


def add_to_server(servicer: Any, server: _Server) -> None:
    """Register `turnout.v1.Generation` and `grpc.health.v1.Health`; Serve calls this in each proxy."""
    unparsed = _Unparsed(server)
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, unparsed)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, unparsed)


def parse(kind: type[M], data: bytes) -> M:
    """Parse a message.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field that is cut short or no UTF-8.
    """
    if data == TOO_LARGE:
        raise invalid("request", f"at most {MAX_REQUEST_BYTES} bytes")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _explain(kind.DESCRIPTOR, data) from None


def _explain(descriptor: Any, data: bytes) -> TurnoutError:
    fault = _find_fault(descriptor, memoryview(data))
    path, reason = fault or ((), "is malformed")
    return invalid(".".join(path) or "request", f"{reason}; expected a {descriptor.full_name} message")


def _find_fault(descriptor: Any, data: memoryview) -> tuple[tuple[str, ...], str] | None:
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        if place < 0:
            return (), "is malformed protobuf"
        field = descriptor.fields_by_number.get(tag >> 3)
        path = (field.name,) if field is not None else ()
        length = 0
        match tag & 7:
            case 0:
                _, place = _varint(data, place)
            case 1:
                length = 8
            case 5:
                length = 4
            case 2:
                length, place = _varint(data, place)
            case _:
                return path, "is malformed protobuf"
        if place < 0 or place + length > len(data):
            return path, "is cut short"
        value, place = data[place : place + length], place + length
        if field is None or tag & 7 != BYTES:
            continue
        inner = _check_value(field, value)
        if inner is not None:
            return (*path, *inner[0]), inner[1]
    return None


def _check_value(field: FieldDescriptor, value: memoryview) -> tuple[tuple[str, ...], str] | None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _find_fault(field.message_type, value)
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            return (), "is no valid UTF-8"
    return None


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """Value and next place; the place is -1 where the number does not end."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            return value, -1
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    return value, -1
