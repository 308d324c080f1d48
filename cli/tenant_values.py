"""What people write of tenants on a command line: limits, ids of keys, spans of time; and limits as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from turnout.access_config import TenantLimits
from turnout.errors import invalid
from turnout.registry import validated
from turnout.types import SharingPolicy

SPAN = re.compile(r"^(\d{1,5})(m|h|d|w)$")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
BUDGET = ("amount", "unit", "per")
SHARING = (("private", ""), ("private", ":"), ("group", ":"))


def parse_limits(values: dict[str, Any], given: list[str]) -> TenantLimits:
    """Limits as they are, with NAME=VALUE pairs over them.

    Raises:
        TurnoutError: INVALID_ARGUMENT, names the limit and what is allowed.
    """
    values = dict(values)
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or name not in TenantLimits.model_fields:
            allowed = ", ".join(TenantLimits.model_fields)
            raise invalid("limit", f"{pair!r} must be NAME=VALUE with one of {allowed}")
        values.pop(name, None)
        if text != "none":
            values[name] = _limit_value(name, text)
    return validated(TenantLimits, values, "limit")


def _limit_value(name: str, text: str) -> Any:
    if name in ("pools", "methods"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "budget":
        words = [word for word in text.split() if word not in ("per", "a")]
        if not 1 <= len(words) <= len(BUDGET):
            raise invalid("limit.budget", f"must be as 1000000 tokens per month (got {text!r})")
        return dict(zip(BUDGET, words, strict=False))
    if name == "sharing":
        policy, colon, group = text.partition(":")
        if (policy, colon) not in SHARING or (colon and not group):
            raise invalid("limit.sharing", f"must be private, group:NAME, private:NAME or none (got {text!r})")
        return {"policy": policy, "group": group or None}
    return text


def key_id(given: str) -> str:
    """The id of a key, or of the whole key, which a user may paste; its secret is not repeated."""
    from deployments.access.keys import parse_key

    parsed = parse_key(given)
    return parsed[0] if parsed is not None else given[:12]


def parse_span(text: str, field: str) -> timedelta:
    """A span as 30m, 24h, 7d.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    found = SPAN.match(text)
    if found is None:
        raise invalid(field, f"must be a number and one of m, h, d, w: 30m, 24h, 7d (got {text!r})")
    return timedelta(**{UNITS[found[2]]: int(found[1])})


def parse_moment(text: str, back: bool = False) -> datetime | None:
    """A time, or a span from now, as aware UTC; None: none is given.

    Raises:
        TurnoutError: INVALID_ARGUMENT.
    """
    if not text:
        return None
    if SPAN.match(text):
        span = parse_span(text, "time")
        return datetime.now(UTC).replace(microsecond=0) + (-span if back else span)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise invalid("time", f"must be as 2026-01-31, 2026-01-31T12:00 or a span as 7d (got {text!r})") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def limit_texts(limits: dict[str, Any]) -> Iterator[str]:
    """Limits other than the defaults, one by one."""
    for name, value in limits.items():
        if name == "budget":
            full = {"unit": "tokens", "per": "month"} | value
            yield f"budget {full['amount']:g} {full['unit']} a {full['per']}"
        elif name == "sharing":
            yield f"sharing {sharing_text(validated(SharingPolicy, value, name))}"
        elif isinstance(value, tuple):
            yield f"{name} {' '.join(value)}"
        else:
            yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def sharing_text(policy: SharingPolicy) -> str:
    """With whom a tenant shares cached prefixes."""
    return policy.policy if policy.group is None else f"{policy.policy}, group {policy.group}"
