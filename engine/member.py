"""A model as its pool sees it."""

from __future__ import annotations

from abc import abstractmethod

from decoding.model import Model
from turnout.calls import CacheStats, MemberStats


class PoolMember(Model):
    """A model as its pool sees it: what methods may ask of it, and what it holds."""

    architecture: str

    @abstractmethod
    def stats(self) -> MemberStats:
        """What it holds right now."""

    @abstractmethod
    def cache_stats(self) -> CacheStats | None:
        """What its prefix store did; None: it has none."""

    @abstractmethod
    def forget(self, tenant: str) -> None:
        """Drop what drafters learned of a tenant's texts."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; what waits is cancelled."""
