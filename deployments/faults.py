"""Errors at the edge: unexpected ones become INTERNAL, and fields are called what the caller called them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from turnout.errors import Code, TurnoutError

logger = logging.getLogger("ray.serve")


def internal(request_id: str) -> TurnoutError:
    """What a caller learns of a fault of ours; the log has the rest under the same request id."""
    return TurnoutError(Code.INTERNAL, f"internal error, request id {request_id}")


@contextmanager
def guarded(request_id: str) -> Iterator[None]:
    """Let TurnoutError pass; log anything else and replace it by INTERNAL."""
    try:
        yield
    except TurnoutError:
        raise
    except Exception as fault:
        logger.exception("request %s failed", request_id)
        error = internal(request_id)
        error.prompt_tokens = getattr(fault, "prompt_tokens", 0)  # see `pool.tasks.run_task`
        raise error from None


def respell(error: TurnoutError, spelling: Mapping[str, str]) -> TurnoutError:
    """Rename the field at fault, see `spelled`."""
    if error.field is None:
        return error
    field, message = spelled(error.field, spelling), error.message
    if field == error.field:
        return error
    if message.startswith(error.field):
        message = field + message.removeprefix(error.field)
    return TurnoutError(error.code, message, field, error.retry_after_s)


def spelled(field: str, spelling: Mapping[str, str]) -> str:
    """Rename a dotted field by its longest prefix in `spelling`."""
    known = [ours for ours in spelling if field == ours or field.startswith(f"{ours}.")]
    if not known:
        return field
    longest = max(known, key=len)
    return spelling[longest] + field.removeprefix(longest)
