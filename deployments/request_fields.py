"""Fields of a request that both front ends read: sampling parameters, request id, session, chat roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, model_validator

from turnout.errors import invalid
from turnout.registry import validated
from turnout.types import SamplingParams

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128
MAX_SESSION_LENGTH = 256
MAX_SALT_LENGTH = 256
MAX_PROMPTS = 128
ROLES = ("system", "user", "assistant", "tool")


class BodyPart(BaseModel):
    """Part of a JSON body: unknown fields are refused, values are immutable, and null means absent.

    Clients send answers back with null for every optional field of an answer, including fields unknown here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values


def parse_sampling(values: Mapping[str, Any], prefix: str = "") -> SamplingParams:
    """Validate sampling parameters.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the parameter (after `prefix`) and what is allowed.
    """
    return validated(SamplingParams, values, prefix)


def request_id(given: str = "", field: str = "request_id") -> str:
    """Return the caller's id if it is usable in a log line, or a new one if it is empty.

    Args:
        given: in the request.
        field: where.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if not given:
        return uuid4().hex
    if len(given) > MAX_REQUEST_ID_LENGTH or not given.isascii() or not given.isprintable():
        raise invalid(field, f"must be at most {MAX_REQUEST_ID_LENGTH} printable ASCII characters")
    return given


def checked_rank(given: int) -> int:
    """Check the number that orders a tenant's waiting calls.

    Raises:
        TurnoutError: INVALID_ARGUMENT: no signed 64-bit number.
    """
    if not -(2**63) <= given < 2**63:
        raise invalid("priority", "must be a signed 64-bit integer")
    return given


def checked_salt(given: str) -> str:
    """Check the length of a cache salt.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too long.
    """
    if len(given) > MAX_SALT_LENGTH:
        raise invalid("cache_salt", f"must be at most {MAX_SALT_LENGTH} characters")
    return given


def session_name(given: str) -> str:
    """Check the length of the caller's session name.

    Raises:
        TurnoutError: INVALID_ARGUMENT: too long.
    """
    if len(given) > MAX_SESSION_LENGTH:
        raise invalid("session", f"must be at most {MAX_SESSION_LENGTH} characters")
    return given


def parse_prompts(value: Any, name: str = "prompt", most: int = MAX_PROMPTS) -> list[str | tuple[int, ...]]:
    """A string, a list of strings, token ids, or a list of token ids.

    Raises:
        TurnoutError: anything else, an empty list, or too many prompts.
    """
    if value is None:
        raise invalid(name, "is needed")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid(name, "must be a string, a list of strings, token ids or a list of token ids")
    if not value:
        raise invalid(name, "must not be empty")
    if all(_is_id(item) for item in value):
        return [tuple(value)]
    if len(value) > most:
        raise invalid(name, f"at most {most} in one request (got {len(value)})")
    return [_one_prompt(item, f"{name}.{place}") for place, item in enumerate(value)]


def _one_prompt(item: Any, field: str) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item and all(_is_id(token) for token in item):
        return tuple(item)
    raise invalid(field, "must be a string or a list of token ids, and not empty")


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
