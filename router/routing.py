"""The routing of one pool: its policy, and the sessions that keep a decision."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from decoding.model import ModelPool
from decoding.parts import PartChoice
from router.base import Asked, RoutingPolicy, make_policy
from router.decision import Decision
from turnout.config import PolicyChoice, StickyConfig
from turnout.errors import invalid
from turnout.types import RouteLimits, given_limits

SessionKey = tuple[str, RouteLimits]


@dataclass(frozen=True, slots=True)
class _Kept:
    decision: Decision
    request_id: str
    until: float
    max_tokens: float  # longest answer it holds for


class Sessions:
    """What sessions were given first, for as long as they go on.

    Where there are too many, the tenant that asks loses its longest unused one if it has more than an equal share, and
    otherwise the tenant that has most: nobody can make the sessions of others be forgotten.

    Args:
        config: how long, and how many.
        clock: seconds.
    """

    def __init__(self, config: StickyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._kept: dict[str, OrderedDict[SessionKey, _Kept]] = {}  # by tenant
        self._count = 0

    def recall(self, asked: Asked) -> Decision | None:
        """The decision that a request's session keeps, if it has one; its time begins anew."""
        kept = self._drop(asked.tenant, _key(asked))
        if kept is None or kept.until <= self._clock() or kept.max_tokens < _max_tokens(asked):
            return None
        self._keep(asked, replace(kept, until=self._until()))
        reason = f"the session keeps what was decided for request {kept.request_id}: {kept.decision.reason}"
        return replace(kept.decision, reason=reason, kept_from=kept.request_id)

    def remember(self, asked: Asked, decision: Decision) -> None:
        """A session's first decision."""
        if asked.session:
            # A way that was found quick enough for a short answer says nothing about a longer one.
            longest = _max_tokens(asked) if "max_latency_s" in decision.limits else math.inf
            self._keep(asked, _Kept(decision, asked.request.id, self._until(), longest))

    def _until(self) -> float:
        return self._clock() + self._config.seconds

    def _keep(self, asked: Asked, kept: _Kept) -> None:
        self._drop(asked.tenant, _key(asked))
        self._kept.setdefault(asked.tenant, OrderedDict())[_key(asked)] = kept
        self._count += 1
        while self._count > self._config.max_sessions:
            tenant = asked.tenant
            if len(self._kept[tenant]) * len(self._kept) <= self._config.max_sessions:
                tenant = max(self._kept, key=lambda name: len(self._kept[name]))
            self._drop(tenant, next(iter(self._kept[tenant])))

    def _drop(self, tenant: str, key: SessionKey) -> _Kept | None:
        mine = self._kept.get(tenant, OrderedDict())
        kept = mine.pop(key, None)
        if kept is not None:
            self._count -= 1
            if not mine:
                del self._kept[tenant]
        return kept


def _key(asked: Asked) -> SessionKey:
    """Other limits ask another question: they are decided for themselves."""
    return (asked.session, asked.limits)


def _max_tokens(asked: Asked) -> int:
    return asked.request.sequence.sampling.max_tokens


class Router:
    """Decides for a pool.

    Args:
        policy: what decides.
        sticky: whether sessions keep their first decision, and how long.
        heeds: whether a request with a limit that no policy looks at is refused.
    """

    def __init__(self, policy: RoutingPolicy, sticky: StickyConfig | None = None, heeds: bool = True) -> None:
        self.policy = policy
        self._heeds = heeds
        self._sessions = Sessions(sticky) if sticky is not None else None

    @classmethod
    def of(
        cls,
        choice: PolicyChoice,
        field: str,
        models: ModelPool,
        sticky: StickyConfig | None = None,
        heeds: bool = True,
    ) -> Router:
        """As configured, and checked against the pool's models and artifacts.

        Raises:
            TurnoutError: no such policy, a parameter or an artifact at fault; names the field.
        """
        policy = make_policy(PartChoice(name=choice.name, params=choice.params), field)
        policy.check(models)
        return cls(policy, sticky, heeds)

    async def decide(self, asked: Asked, models: ModelPool) -> Decision:
        """How a request is answered.

        Raises:
            TurnoutError: its limits cannot be kept, or no policy looks at one of them.
        """
        kept = self._sessions.recall(asked) if self._sessions is not None else None
        if kept is not None:
            return kept
        decision = await self.policy.decide(asked, models)
        unheeded = [name for name in given_limits(asked.limits) if name not in asked.heeded]
        if self._heeds and unheeded:
            raise invalid(f"limits.{unheeded[0]}", f"the routing policy {decision.policy} keeps none; leave it out")
        if self._sessions is not None:
            self._sessions.remember(asked, decision)
        return decision

    def keep(self, asked: Asked, decision: Decision) -> Decision:
        """What was decided for a request elsewhere holds here too, for it and for its session."""
        if self._sessions is not None:
            self._sessions.remember(asked, decision)
        return decision
