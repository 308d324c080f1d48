"""What a rule or an arm leads to: a method, or another policy that decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from decoding.model import ModelPool
from router.base import Asked, RoutingPolicy, make_policy, policy_class
from router.decision import Decision
from turnout.part_choice import PartChoice
from turnout.registry import get_method


class Target(BaseModel):
    """Exactly one of a method and a policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Annotated[
        PartChoice | None, Field(description="decoding method: NAME, or {name: NAME, PARAMETER: ...}")
    ] = None
    policy: Annotated[PartChoice | None, Field(description="routing policy that decides: as a method is given")] = None

    @model_validator(mode="after")
    def _check_one(self) -> Target:
        if (self.method is None) == (self.policy is None):
            raise ValueError("give exactly one of method and policy")
        return self

    def check(self, field: str) -> None:
        """Refuse methods, policies and parameters that do not exist.

        Raises:
            TurnoutError: naming the field.
        """
        if self.method is not None:
            get_method(self.method.name, f"{field}.method.name").parse(self.method.params, f"{field}.method")
        if self.policy is not None:
            part = policy_class(self.policy.name, f"{field}.policy.name")
            part.parse_params(self.policy.params, f"{field}.policy")

    def policy_of(self, field: str) -> RoutingPolicy | None:
        """The policy that decides, made once; None where it is a method."""
        return make_policy(self.policy, f"{field}.policy") if self.policy is not None else None


def methods_of(target: Target, inner: RoutingPolicy | None, field: str) -> Iterator[tuple[str, PartChoice]]:
    """The methods that a target may lead to; see `RoutingPolicy.methods`."""
    if inner is not None:
        return inner.methods(f"{field}.policy")
    assert target.method is not None
    return iter([(f"{field}.method", target.method)])


@dataclass(frozen=True, slots=True)
class Outer:
    """What a policy with targets says about its own choice."""

    policy: str
    version: str
    features: dict[str, float]
    reason: str
    limits: dict[str, float]
    arm: str = ""


async def follow(
    target: Target, inner: RoutingPolicy | None, outer: Outer, asked: Asked, models: ModelPool
) -> Decision:
    """The decision that a target leads to, with the choice of the target explained in it.

    Args:
        target: what was chosen.
        inner: `target.policy_of`.
        outer: why.
        asked: the request.
        models: the pool's.
    """
    if inner is None:
        assert target.method is not None
        about: dict[str, Any] = {"features": outer.features, "limits": outer.limits, "reason": outer.reason}
        return Decision(target.method.name, target.method.params, outer.policy, outer.version, arm=outer.arm, **about)
    decided = await inner.decide(asked, models)
    return replace(
        decided,
        policy=f"{outer.policy}/{decided.policy}",
        version=f"{outer.version}/{decided.version}",
        features={**outer.features, **decided.features},
        limits={**outer.limits, **decided.limits},
        reason=f"{outer.reason}; {decided.reason}",
        arm="/".join(filter(None, (outer.arm, decided.arm))),
    )
