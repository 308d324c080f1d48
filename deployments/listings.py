"""Listings of what pools offer: models, decoding methods, parts. They do not change while we run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from deployments.backend import Backend
from turnout.calls import MethodDescription, ModelDescription


class Listings:
    """What the pools of a server offer; models and methods are asked for once.

    Args:
        backends: the pools by name.
        limit: the longest that a question may take.
    """

    def __init__(
        self, backends: Mapping[str, Backend], limit: Callable[[], AbstractAsyncContextManager[object]]
    ) -> None:
        self._backends = backends
        self._limit = limit
        self._models: list[ModelDescription] | None = None
        self._methods: list[MethodDescription] | None = None

    async def models(self) -> list[ModelDescription]:
        """Each pool, then its members; a model of two pools is listed once."""
        if self._models is None:
            found: dict[str, ModelDescription] = {}
            for backend in self._backends.values():
                async with self._limit():
                    for model in await backend.models():
                        found.setdefault(model.name, model)
            self._models = list(found.values())
        return self._models

    async def methods(self) -> list[MethodDescription]:
        """Decoding methods; they are the same in every pool."""
        if self._methods is None:
            async with self._limit():
                self._methods = await next(iter(self._backends.values())).methods()
        return self._methods

    async def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        """JSON schemas of the parts in slots, by slot and name; the same in every pool."""
        async with self._limit():
            return await next(iter(self._backends.values())).parts(slots)
