"""Names that a request may put in `model`, and the pools they stand for."""

from __future__ import annotations

from collections.abc import Mapping

from turnout.access_config import UNLIMITED, TenantLimits
from turnout.config import PoolConfig
from turnout.errors import TurnoutError, invalid, not_found


class ModelNames:
    """Each pool's own name and those of its members; a model may be a member of several pools.

    Args:
        pools: as configured.
    """

    def __init__(self, pools: Mapping[str, PoolConfig]) -> None:
        self._own = list(pools)
        self._pools: dict[str, list[str]] = {name: [name] for name in pools}
        for name, pool in pools.items():
            for member in pool.members:
                self._pools.setdefault(member, []).append(name)

    def resolved(self, given: str, limits: TenantLimits = UNLIMITED) -> str:
        """A request's `model`; empty means the only pool. A refusal names those within the caller's limits.

        Raises:
            TurnoutError: NOT_FOUND, or INVALID_ARGUMENT where empty is ambiguous.
        """
        if given in self._pools:
            return given
        if given:
            raise not_found("model", given[:100], [name for name in self._pools if self.allowed(name, limits)])
        if len(self._own) == 1:
            return self._own[0]
        pools = sorted(filter(limits.allows_pool, self._own))
        raise invalid("model", f"is needed here; pools: {', '.join(pools)}")

    def label(self, given: str) -> str:
        """The name for metrics; unknown ones share the empty one, so that callers cannot make up series."""
        try:
            return self.resolved(given)
        except TurnoutError:
            return ""

    def pool(self, model: str, limits: TenantLimits = UNLIMITED) -> str:
        """The pool that answers for a known name: the first that a caller may ask; if it may ask none, the first."""
        pools = self._pools[model]
        return next(filter(limits.allows_pool, pools), pools[0])

    def allowed(self, model: str, limits: TenantLimits) -> bool:
        """Whether a caller may ask a pool that has the model."""
        return limits.allows_pool(self.pool(model, limits))
