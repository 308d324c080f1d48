"""The routing of one pool: its policy, and the sessions that keep a decision."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from decoding.model import ModelPool
from decoding.parts import PartChoice
from router.base import Asked, RoutingPolicy, make_policy
from router.decision import Decision
from turnout.config import PolicyChoice, StickyConfig
from turnout.types import RouteLimits

SessionKey = tuple[str, str, RouteLimits]


@dataclass(frozen=True, slots=True)
class _Kept:
    decision: Decision
    request_id: str
    until: float


class Sessions:
    """What sessions were given first, for as long as they go on.

    Args:
        config: how long, and how many.
        clock: seconds.
    """

    def __init__(self, config: StickyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._kept: OrderedDict[SessionKey, _Kept] = OrderedDict()

    def recall(self, asked: Asked) -> Decision | None:
        """The decision that a request's session keeps, if it has one; its time begins anew."""
        kept = self._kept.pop(_key(asked), None)
        if kept is None or kept.until <= self._clock():
            return None
        self._keep(asked, kept.decision, kept.request_id)
        reason = f"the session keeps what was decided for request {kept.request_id}: {kept.decision.reason}"
        return replace(kept.decision, reason=reason, kept_from=kept.request_id)

    def remember(self, asked: Asked, decision: Decision) -> None:
        """A session's first decision."""
        if asked.session:
            self._keep(asked, decision, asked.request.id)

    def _keep(self, asked: Asked, decision: Decision, request_id: str) -> None:
        self._kept[_key(asked)] = _Kept(decision, request_id, self._clock() + self._config.seconds)
        while len(self._kept) > self._config.max_sessions:
            self._kept.popitem(last=False)


def _key(asked: Asked) -> SessionKey:
    """Other limits ask another question: they are decided for themselves."""
    return (asked.tenant, asked.session, asked.limits)


class Router:
    """Decides for a pool.

    Args:
        policy: what decides.
        sticky: whether sessions keep their first decision, and how long.
    """

    def __init__(self, policy: RoutingPolicy, sticky: StickyConfig | None = None) -> None:
        self.policy = policy
        self._sessions = Sessions(sticky) if sticky is not None else None

    @classmethod
    def of(cls, choice: PolicyChoice, field: str, models: ModelPool, sticky: StickyConfig | None = None) -> Router:
        """As configured, and checked against the pool's models and artifacts.

        Raises:
            TurnoutError: no such policy, a parameter or an artifact at fault; names the field.
        """
        policy = make_policy(PartChoice(name=choice.name, params=choice.params), field)
        policy.check(models)
        return cls(policy, sticky)

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """How a request is answered.

        Raises:
            TurnoutError: its limits cannot be kept.
        """
        kept = self._sessions.recall(asked) if self._sessions is not None else None
        if kept is not None:
            return kept
        decision = await self.policy.decide(asked, models)
        if self._sessions is not None:
            self._sessions.remember(asked, decision)
        return decision

    def keep(self, asked: Asked, decision: Decision) -> Decision:
        """What was decided for a request elsewhere holds here too, for it and for its session."""
        if self._sessions is not None:
            self._sessions.remember(asked, decision)
        return decision
