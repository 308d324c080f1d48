"""What a router decided, and why: plain values that travel, are logged and are replayed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from decoding.artifacts import VERSION_DIGITS
from turnout.errors import invalid


@dataclass(frozen=True, slots=True)
class Decision:
    """How one request is answered.

    Attributes:
        method: registered method to run.
        params: its parameters.
        policy: which routing policy decided.
        version: names the artifacts and the rules it used: 12 hexadecimal digits of the content of each, the rules
            last, "+" between them. Where a policy left the choice to another one, policies and versions stand one after
            the other with "/" between them.
        features: what it looked at.
        scores: what it predicted of each choice.
        limits: what the scores were compared with. Where a time was, `max_tokens` is the longest answer that the
            decision holds for, in tokens.
        reason: one sentence for people.
        sampling: sampling parameters it sets instead of the caller's; `max_tokens` can only lower the caller's. Two
            are worked out from each request's own, so that a session's later requests get theirs:
            `max_tokens_share`, of the caller's most tokens, and `greedy_temperature`, where the caller asked for
            temperature 0.
        suffix: text put after the question.
        arm: arm of a split; "" without one.
        kept_from: request whose decision its session keeps; "" where this one was decided itself.
    """

    method: str
    params: dict[str, Any]
    policy: str
    version: str
    features: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    suffix: str = ""
    arm: str = ""
    kept_from: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Any, where: str = "decision") -> Self:
        """What `as_json` made.

        Args:
            values: parsed JSON.
            where: name of the field it stands in, for refusals.

        Raises:
            TurnoutError: INVALID_ARGUMENT: no such object.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(values, dict) or not {"method", "params", "policy", "version"} <= set(values) <= names:
            raise invalid(where, "must be the object that an explained answer or the route log shows")
        return cls(**values)


def rules_version(rules: Any) -> str:
    """A name for rules, as JSON-able values: equal for equal rules."""
    text = json.dumps(rules, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=VERSION_DIGITS // 2).hexdigest()
