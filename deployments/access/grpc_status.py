"""gRPC's side of access: credentials from metadata, and when to try again in the trailing metadata."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from deployments.access.callers import PRIORITY_HEADER, Caller, Callers
from turnout.errors import TurnoutError

RETRY_AFTER = "retry-after-s"
DETAILS = "grpc-status-details-bin"  # where gRPC's own libraries look for google.rpc.Status


def caller_of(callers: Callers, context: Any) -> Caller:
    """Who makes a call, by its metadata `authorization` and `x-turnout-priority`.

    Raises:
        TurnoutError: see `Callers.of`.
    """
    metadata = _metadata(context)
    return callers.of(metadata.get("authorization"), metadata.get(PRIORITY_HEADER))


def key_of(callers: Callers, context: Any) -> str:
    """As `Callers.key_of`."""
    return callers.key_of(_metadata(context).get("authorization"))


def _metadata(context: Any) -> dict[str, str]:
    return {key.lower(): value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def tell(context: Any, error: TurnoutError) -> None:
    """End a call with an error: code, message, and when to try again."""
    code = grpc.StatusCode[error.code.name]
    context.set_code(code)
    context.set_details(error.message)
    if error.retry_after_s is None:
        return
    delay = Duration()
    delay.FromNanoseconds(round(error.retry_after_s * 1e9))
    status = Status(code=code.value[0], message=error.message)
    status.details.add().Pack(RetryInfo(retry_delay=delay))
    # As a list: Serve puts the request's id in front of it.
    context.set_trailing_metadata([(RETRY_AFTER, f"{error.retry_after_s:.3f}"), (DETAILS, status.SerializeToString())])
