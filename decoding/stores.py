"""What drafters learn and share beyond a request: one store per kind and tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")

MOST_STORES = 256


class Stores:
    """Shared state by kind and tenant. Lives beside a model; only its event loop touches it, so updates are ordered.

    Tenants never see each other's stores: what one wrote could be read out of another's drafts.

    Args:
        most: stores kept; the least recently opened one is forgotten first.
    """

    def __init__(self, most: int = MOST_STORES) -> None:
        self._most = most
        self._stores: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def open(self, kind: str, tenant: str, make: Callable[[], T]) -> T:
        """The tenant's store of a kind, made on first use.

        Args:
            kind: who uses it and with what shape, e.g. "token_recycling/8"; the same kind must mean the same type.
            tenant: whose it is.
            make: an empty one.
        """
        key = (kind, tenant)
        if key not in self._stores:
            self._stores[key] = make()
            while len(self._stores) > self._most:
                self._stores.popitem(last=False)
        self._stores.move_to_end(key)
        return cast(T, self._stores[key])

    def forget(self, tenant: str) -> None:
        """Drop everything of a tenant."""
        for key in [key for key in self._stores if key[1] == tenant]:
            del self._stores[key]
