"""Tenants that are no more: what was learned of their texts is forgotten before one of their name is let in again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from deployments.access.callers import Callers

log = logging.getLogger("ray.serve")


class Forgetful(Protocol):
    """A pool, as far as it is asked to forget; `deployments.backend.Backend` is one."""

    async def forget(self, tenant: str) -> None:
        """See `deployments.backend.Backend.forget`."""
        ...


class Departed:
    """Has every pool forget the tenants that have left the tenants file, and those that have come into it.

    Both, for an answer that was under way when its tenant left may have gone on to learn.

    Args:
        callers: say who has left or come.
        pools: by name.
    """

    def __init__(self, callers: Callers, pools: Mapping[str, Forgetful]) -> None:
        self._callers = callers
        self._pools = pools
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def settled(self, tenant: str) -> None:
        """A request of a tenant is to be let in: nothing is known any more of another one that had its name."""
        for name in self._callers.changed():
            self._tasks[name] = asyncio.create_task(self._forget(name, self._tasks.get(name)))
        task = self._tasks.get(tenant)
        if task is not None:
            await asyncio.shield(task)

    async def _forget(self, tenant: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        asked = await asyncio.gather(*(pool.forget(tenant) for pool in self._pools.values()), return_exceptions=True)
        for name, answer in zip(self._pools, asked, strict=True):
            if isinstance(answer, Exception):
                log.warning("pool %s may still know what it learned of the former tenant %s: %s", name, tenant, answer)
        if self._tasks.get(tenant) is asyncio.current_task():
            del self._tasks[tenant]
