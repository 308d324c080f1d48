"""Sticky shares of the traffic, each answered in its own way: A/B comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from decoding.model import ModelPool
from router.base import Asked, RoutingPolicy
from router.decision import Decision, rules_version
from router.experiment_winner import DECIDED, DecidedFile
from router.hashing import share_of
from router.rule_targets import Outer, Target, follow, methods_of
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams

ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Arm(Target):
    """One of the ways."""

    share: Annotated[FiniteFloat, Field(ge=0, le=1, description="share of the traffic")]


class SplitParams(MethodParams):
    """Parameters of `split`."""

    arms: Annotated[dict[ArmName, Arm], Field(min_length=1, description="the ways by name; shares add up to 1")]
    by: Annotated[
        Literal["session", "tenant", "request"],
        Field(description="what stays with its arm; session: requests without one are divided each by itself"),
    ] = "session"
    seed: Annotated[int, Field(ge=0, lt=2**63, description="another seed divides independently")] = 0
    decided: Annotated[
        str | None,
        Field(min_length=1, description="file by which `turnout experiment live --decide` gives all to one arm"),
    ] = None

    @model_validator(mode="after")
    def _check_shares(self) -> SplitParams:
        total = math.fsum(arm.share for arm in self.arms.values())
        if abs(total - 1.0) > 1e-9:
            raise ValueError(f"shares must add up to 1, not to {total:g}")
        return self


class SplitPolicy(RoutingPolicy):
    """Divides the traffic by a keyed hash: an arm's share of sessions, tenants or requests, always the same ones.

    An arm keeps what it has when the order and the shares of those before it stay; the tenant is always part of the
    key, so that equal session names of two tenants are two sessions. Once a live experiment has decided, everything
    goes to the arm that its file names; what was answered before stays as it was.
    """

    Params = SplitParams
    params: SplitParams

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._version = rules_version(self.params.model_dump(mode="json"))
        path = self.params.decided
        self._decided = DecidedFile(Path(path).expanduser(), self.params.arms) if path is not None else None
        self._inner = {name: arm.policy_of(f"arms.{name}") for name, arm in self.params.arms.items()}

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        for inner in self._inner.values():
            if inner is not None:
                inner.check(models)

    def keeps(self, decision: Decision) -> bool:
        """See `RoutingPolicy.keeps`: once the split is decided, sessions of its other arms go where all others do."""
        ended = self._decided is not None and self._decided.get() is not None
        if self.name in decision.policy.split("/") and ended != (DECIDED in decision.features):
            return False
        return all(inner.keeps(decision) for inner in self._inner.values() if inner is not None)

    def methods(self, field: str) -> Iterator[tuple[str, PartChoice]]:
        """See `RoutingPolicy.methods`."""
        for name, arm in self.params.arms.items():
            yield from methods_of(arm, self._inner[name], f"{field}.arms.{name}")

    @classmethod
    def check_params(cls, params: Any, field: str) -> None:
        """See `RoutingPolicy.check_params`."""
        for name, arm in params.arms.items():
            arm.check(f"{field}.arms.{name}")

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """See `RoutingPolicy.decide`."""
        unit, what = self._unit(asked)
        place = share_of(self.params.seed, "split", *unit)
        ended = self._decided.get() if self._decided is not None else None
        if ended is not None:
            features = {"place": place, DECIDED: 1.0}
            reason = f"the split was decided for arm {ended.arm}"
            outer = Outer(self.name, f"{self._version}+{ended.version}", features, reason, {}, ended.arm)
            return await self._follow(outer, asked, models)
        name, low, high = self._arm_at(place)
        reason = f"this {what} is in arm {name} ({self.params.arms[name].share:.0%} of them)"
        limits = {"arm_from": low, "arm_to": high}
        outer = Outer(self.name, self._version, {"place": place}, reason, limits, name)
        return await self._follow(outer, asked, models)

    async def _follow(self, outer: Outer, asked: Asked, models: ModelPool) -> Decision:
        asked.arm = {"arm": outer.arm, "version": outer.version, "features": outer.features}
        return await follow(self.params.arms[outer.arm], self._inner[outer.arm], outer, asked, models)

    def _unit(self, asked: Asked) -> tuple[tuple[str, ...], str]:
        if self.params.by == "tenant":
            return (asked.tenant,), "tenant"
        if self.params.by == "session" and asked.session:
            return (asked.tenant, asked.session), "session"
        return (asked.tenant, "", asked.request.id), "request"

    def _arm_at(self, place: float) -> tuple[str, float, float]:
        """The arm whose interval of [0, 1) holds a place, and the interval."""
        low, last = 0.0, ("", 0.0, 0.0)
        for name, arm in self.params.arms.items():
            high = low + arm.share
            if arm.share > 0:
                last = (name, low, high)
                if place < high:
                    break
            low = high
        return last


PART = SplitPolicy
