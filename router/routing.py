"""The routing of one pool: its policy, and the sessions that keep a decision."""

from __future__ import annotations

import math
from collections.abc import Callable
from logging import getLogger

from decoding.model import ModelPool
from router.base import Asked, RoutingPolicy, make_policy
from router.decision import Decision
from turnout.config import PolicyChoice, StickyConfig
from turnout.errors import TurnoutError, invalid
from turnout.part_choice import PartChoice
from turnout.tenant_lru import SessionKey, Sessions
from turnout.types import given_limits

log = getLogger(__name__)

Check = Callable[[Decision], None]  # raises TurnoutError


class Router:
    """Decides for a pool.

    Args:
        policy: what decides.
        sticky: whether sessions keep their first decision, and how long.
        checks_limits: whether a request with a limit that no policy reads is refused.
    """

    def __init__(self, policy: RoutingPolicy, sticky: StickyConfig | None = None, checks_limits: bool = True) -> None:
        self.policy = policy
        self._checks_limits = checks_limits
        self._sessions = Sessions(sticky) if sticky is not None else None

    @classmethod
    def of(
        cls,
        choice: PolicyChoice,
        field: str,
        models: ModelPool,
        sticky: StickyConfig | None = None,
        checks_limits: bool = True,
    ) -> Router:
        """As configured, and checked against the pool's models and artifacts.

        Raises:
            TurnoutError: no such policy, a parameter or an artifact at fault; names the field.
        """
        policy = make_policy(PartChoice(name=choice.name, params=choice.params), field)
        policy.check(models)
        return cls(policy, sticky, checks_limits)

    async def decide(
        self, asked: Asked, models: ModelPool, before: Decision | None = None, check: Check | None = None
    ) -> Decision:
        """How a request is answered.

        Args:
            asked: the request.
            models: the pool's.
            before: what was decided elsewhere, about it or for its session; it holds here, too.
            check: refuses what cannot be run any more; what a session keeps is then decided anew. None: it must hold.

        Raises:
            TurnoutError: its limits cannot be kept, or no policy looks at one of them.
        """
        decision = before if before is not None else self._recalled(asked)
        if decision is None or not self._holds(decision, asked, check):
            decision = await self.policy.decide(asked, models)
            unread = [name for name in given_limits(asked.limits) if name not in asked.read_limits]
            if self._checks_limits and unread:
                raise invalid(f"limits.{unread[0]}", f"the routing policy {decision.policy} keeps none; leave it out")
        if self._sessions is not None:
            self._sessions.remember(_key(asked), asked.request.id, decision.as_json())
        return decision

    def forget(self, tenant: str) -> None:
        """Forget what a tenant's sessions keep."""
        if self._sessions is not None:
            self._sessions.forget(tenant)

    def _recalled(self, asked: Asked) -> Decision | None:
        kept = self._sessions.recall(_key(asked)) if self._sessions is not None else None
        return Decision.of_json(kept) if kept is not None else None

    def _holds(self, decision: Decision, asked: Asked, check: Check | None) -> bool:
        """Whether an earlier decision is one for this request, too."""
        if decision.limits.get("max_tokens", math.inf) < asked.request.sequence.sampling.max_tokens:
            return False
        if decision.kept_from and check is not None:
            if not self.policy.keeps(decision):
                return False
            try:
                check(decision)
            except TurnoutError as error:
                log.info("what was decided for request %s holds no longer: %s", decision.kept_from, error.message)
                return False
        return True


def _key(asked: Asked) -> SessionKey:
    return SessionKey(asked.tenant, asked.session, asked.limits)
