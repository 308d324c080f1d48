"""What sessions keep of what was decided about their first requests, wherever it is remembered."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from turnout.config import StickyConfig
from turnout.types import RouteLimits

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Values of tenants by key, a bounded number of them.

    Where there are too many, the tenant that asks loses its longest unused one if it has more than an equal share, and
    otherwise the tenant that has the most: no tenant can evict entries of another.

    Args:
        most: values.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._held: dict[str, OrderedDict[K, V]] = {}  # by tenant

    def get(self, tenant: str, key: K) -> V | None:
        """A value, or None; asking is no use of it."""
        mine = self._held.get(tenant)
        return None if mine is None else mine.get(key)

    def put(self, tenant: str, key: K, value: V) -> None:
        """Remember a value, as the last used one."""
        self.drop(tenant, key)
        self._held.setdefault(tenant, OrderedDict())[key] = value
        self._count += 1
        while self._count > self._most:
            loser = tenant
            if len(self._held[tenant]) * len(self._held) <= self._most:
                loser = max(self._held, key=lambda name: len(self._held[name]))
            self.drop(loser, next(iter(self._held[loser])))

    def drop(self, tenant: str, key: K) -> V | None:
        """Forget a value; which it was."""
        mine = self._held.get(tenant)
        if mine is None or key not in mine:
            return None
        found = mine.pop(key)
        self._count -= 1
        if not mine:
            del self._held[tenant]
        return found

    def forget(self, tenant: str) -> None:
        """Forget all values of a tenant."""
        self._count -= len(self._held.pop(tenant, {}))


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Requests that keep one decision: with other limits another question is asked, which is decided for itself."""

    tenant: str
    session: str
    limits: RouteLimits


@dataclass(frozen=True, slots=True)
class _Kept:
    decision: dict[str, Any]
    until: float


class Sessions:
    """What sessions were given first, for as long as they go on; decisions are `router.decision.Decision` as JSON.

    Args:
        config: how long, and how many.
        clock: seconds.
    """

    def __init__(self, config: StickyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._kept: Remembered[SessionKey, _Kept] = Remembered(config.max_sessions)

    def recall(self, key: SessionKey) -> dict[str, Any] | None:
        """The decision that a request's session keeps, if it has one; its time begins anew."""
        kept = self._kept.drop(key.tenant, key)
        if kept is None or kept.until <= self._clock():
            return None
        self._keep(key, kept.decision)
        return kept.decision

    def forget(self, tenant: str) -> None:
        """Forget a tenant's sessions."""
        self._kept.forget(tenant)

    def remember(self, key: SessionKey, request_id: str, decision: dict[str, Any]) -> None:
        """What a session's request was given: decided about it, or kept by another holder of the session, too."""
        if key.session:
            self._keep(key, _as_kept(decision, request_id))

    def _keep(self, key: SessionKey, decision: dict[str, Any]) -> None:
        self._kept.put(key.tenant, key, _Kept(decision, self._clock() + self._config.seconds))


def _as_kept(decision: dict[str, Any], request_id: str) -> dict[str, Any]:
    """The decision about a request as later ones of its session say it."""
    if decision.get("kept_from"):
        return decision
    reason = f"the session keeps what was decided for request {request_id}: {decision.get('reason', '')}"
    return {**decision, "reason": reason, "kept_from": request_id}
