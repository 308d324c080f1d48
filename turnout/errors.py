"""The one error type that crosses a layer: a code every front end can translate, and the field at fault."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnout.moved_calls import Moved

BUSY_RETRY_S = 1.0


class Code(StrEnum):
    """Outcome classes shared by gRPC and HTTP; the values are gRPC's status names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    NOT_FOUND = "NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class TurnoutError(Exception):
    """A refusal or a failure that the caller may read.

    Args:
        code: what kind of outcome this is.
        message: one sentence that names the field and, for a bad value, what is allowed.
        field: dotted name of the field at fault, as the caller spelled it; None when no field is.
        retry_after_s: when the same call may be let in, in seconds from now; None: nothing is known.

    Attributes:
        prompt_tokens: that were read before it was raised, of a task, which is billed for them.
    """

    def __init__(self, code: Code, message: str, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(code, message, field)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.prompt_tokens = 0

    def __str__(self) -> str:
        return self.message


class FieldError(ValueError):
    """Error of one field, raised by a model's validator; `explain` adds the path of the model.

    Args:
        field: of the model.
        message: what is allowed.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message


def invalid(field: str, message: str) -> TurnoutError:
    """A value of the right type that is not allowed, or an unknown field."""
    return TurnoutError(Code.INVALID_ARGUMENT, f"{field}: {message}", field)


def out_of_range(field: str, message: str) -> TurnoutError:
    """A value beyond a limit that depends on the model or the server (context length, vocabulary)."""
    return TurnoutError(Code.OUT_OF_RANGE, f"{field}: {message}", field)


def busy(message: str, field: str | None = None) -> TurnoutError:
    """No room just now, and when it is worth another try; clients of gRPC streams get that from the message only."""
    return TurnoutError(Code.RESOURCE_EXHAUSTED, f"{message}; try again in {BUSY_RETRY_S:.1f} s", field, BUSY_RETRY_S)


def not_found(field: str, value: str, known: list[str]) -> TurnoutError:
    """An unknown name; the message lists those that exist."""
    listed = ", ".join(sorted(known)) or "none"
    return TurnoutError(Code.NOT_FOUND, f"{field}: {value!r} is not known; available: {listed}", field)


class Interrupted(TurnoutError):  # noqa: N818 - no error: the call can be repeated
    """A process that worked on a call has ended: the same call, made again with its seed, gives the same answer.

    Args:
        message: what happened.
        moved: what the next one need not do again; None: nothing is known.
    """

    def __init__(self, message: str, moved: Moved | None = None) -> None:
        super().__init__(Code.UNAVAILABLE, message)
        self.moved = moved

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, Moved | None]]:
        return Interrupted, (self.message, self.moved)
