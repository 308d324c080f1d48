"""Rules in their order: the first that fits decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from decoding.model import ModelPool
from router.base import Asked, RoutingPolicy
from router.decision import Decision, rules_version
from router.patterns import LONGEST_PATTERN, Pattern, SearchedText
from router.rule_targets import Outer, Target, follow, methods_of
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams
from turnout.types import RouteLimits

Names = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(min_length=1, max_length=1000)]


class Range(BaseModel):
    """An interval, both ends in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: Annotated[FiniteFloat | None, Field(description="least")] = None
    max: Annotated[FiniteFloat | None, Field(description="most")] = None

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min must be at most max ({self.max:g})")
        return self

    def holds(self, value: float | None) -> bool:
        """Whether there is a value, and it lies in the interval."""
        low = -float("inf") if self.min is None else self.min
        high = float("inf") if self.max is None else self.max
        return value is not None and low <= value <= high

    def __str__(self) -> str:
        if self.min is None:
            return f"at most {self.max:g}"
        return f"at least {self.min:g}" if self.max is None else f"from {self.min:g} to {self.max:g}"


class When(BaseModel):
    """Conditions; all that are given must hold. A limit's condition fails where the caller set no such limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: Annotated[Range | None, Field(description="length of the prompt, tokens")] = None
    max_tokens: Annotated[Range | None, Field(description="most tokens the answer may have")] = None
    max_cost: Annotated[Range | None, Field(description="the caller's limit of the cost")] = None
    max_latency_s: Annotated[Range | None, Field(description="the caller's limit of the time, seconds")] = None
    quality: Annotated[Range | None, Field(description="the least quality the caller wants")] = None
    tenants: Annotated[Names | None, Field(description="one of these tenants")] = None
    sessions: Annotated[Names | None, Field(description="one of these sessions")] = None
    pattern: Annotated[
        str | None,
        Field(min_length=1, max_length=LONGEST_PATTERN, description="regular expression found in the question"),
    ] = None
    ignore_case: Annotated[bool, Field(description="whether pattern takes capitals for small letters")] = False

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not self.model_fields_set - {"ignore_case"}:
            raise ValueError("at least one condition is needed")
        return self


class Rule(Target):
    """Conditions, and what they lead to."""

    when: When
    name: Annotated[str, Field(max_length=64, description="for explanations; absent: the rule's number")] = ""


class StaticParams(MethodParams):
    """Parameters of `static`."""

    rules: Annotated[tuple[Rule, ...], Field(max_length=1000, description="in order; the first that fits decides")] = ()
    default: Annotated[Target, Field(description="where no rule fits")]


class StaticPolicy(RoutingPolicy):
    """Written rules over the request's length, tenant, session, text and limits; the first that fits decides."""

    Params = StaticParams
    params: StaticParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._version = rules_version(self.params.model_dump(mode="json"))
        self._patterns = [_pattern_of(rule.when) for rule in self.params.rules]
        self._inner = [rule.policy_of(f"rules.{place}") for place, rule in enumerate(self.params.rules)]
        self._otherwise = self.params.default.policy_of("default")
        ranges = ((name, getattr(rule.when, name)) for rule in self.params.rules for name in RouteLimits.model_fields)
        self._reads_limits = {name for name, wanted in ranges if wanted is not None}

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        for inner in (*self._inner, self._otherwise):
            if inner is not None:
                inner.check(models)

    def keeps(self, decision: Decision) -> bool:
        """See `RoutingPolicy.keeps`."""
        return all(inner.keeps(decision) for inner in (*self._inner, self._otherwise) if inner is not None)

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """See `RoutingPolicy.methods`."""
        for place, rule in enumerate(self.params.rules):
            yield from methods_of(rule, self._inner[place], f"{field}.rules.{place}")
        yield from methods_of(self.params.default, self._otherwise, f"{field}.default")

    @classmethod
    def check_params(cls, params: Any, field: str) -> None:
        """See `RoutingPolicy.check_params`."""
        for place, rule in enumerate(params.rules):
            rule.check(f"{field}.rules.{place}")
            try:
                _pattern_of(rule.when)
            except ValueError as error:
                raise invalid(f"{field}.rules.{place}.when.pattern", str(error)) from None
        params.default.check(f"{field}.default")

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        numbers = _numbers(asked)
        asked.read_limits.update(self._reads_limits)
        features = {name: value for name, value in numbers.items() if value is not None}
        if any(self._patterns):  # a thousand of them take a while over a long text; other requests go on meanwhile
            found = await asyncio.to_thread(self._first, numbers, asked)
        else:
            found = self._first(numbers, asked)
        if found is not None:
            place, reasons = found
            rule = self.params.rules[place]
            reason = f"rule {rule.name or place + 1}: {', '.join(reasons)}"
            outer = Outer(self.name, self._version, {**features, "rule": place + 1}, reason, _limits(rule.when))
            return await follow(rule, self._inner[place], outer, asked, models)
        outer = Outer(self.name, self._version, {**features, "rule": 0}, "no rule fits", {})
        return await follow(self.params.default, self._otherwise, outer, asked, models)

    def _first(self, numbers: dict[str, float | None], asked: Asked) -> tuple[int, list[str]] | None:
        """Place of the first rule that fits, and what made it fit."""
        text = SearchedText(asked.prompt_text)
        for place in range(len(self.params.rules)):
            reasons = self._why(place, numbers, asked, text)
            if reasons is not None:
                return place, reasons
        return None

    def _why(self, place: int, numbers: dict[str, float | None], asked: Asked, text: SearchedText) -> list[str] | None:
        """What made a rule fit; None where it does not."""
        when = self.params.rules[place].when
        reasons = []
        for name, value in numbers.items():
            wanted: Range | None = getattr(when, name)
            if wanted is not None:
                if not wanted.holds(value):
                    return None
                reasons.append(f"{name} {value:g} is {wanted}")
        for name, known, whose in (("tenant", when.tenants, asked.tenant), ("session", when.sessions, asked.session)):
            if known is not None:
                if whose not in known:
                    return None
                reasons.append(f"{name} {whose!r}")
        pattern = self._patterns[place]
        if pattern is not None:
            if not pattern.found_in(text):
                return None
            reasons.append("pattern found")
        return reasons


def _pattern_of(when: When) -> Pattern | None:
    return Pattern(when.pattern, when.ignore_case) if when.pattern is not None else None


def _numbers(asked: Asked) -> dict[str, float | None]:
    """What a range can be about; None where the caller set nothing."""
    sequence, limits = asked.request.sequence, asked.limits
    return {
        "prompt_tokens": sequence.num_prompt_tokens,
        "max_tokens": sequence.sampling.max_tokens,
        "max_cost": limits.max_cost,
        "max_latency_s": limits.max_latency_s,
        "quality": limits.quality,
    }


def _limits(when: When) -> dict[str, float]:
    found = {}
    for name in ("prompt_tokens", "max_tokens", "max_cost", "max_latency_s", "quality"):
        wanted: Range | None = getattr(when, name)
        for end in ("min", "max"):
            value = getattr(wanted, end, None)
            if value is not None:
                found[f"{name}_{end}"] = value
    return found


PART = StaticPolicy
