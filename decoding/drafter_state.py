"""State that drafters learn and share beyond a request: one store per kind and tenant."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Where a request names no drafter its tenant has some seven, small ones.
MOST_STORES = 2048
MOST_BYTES = 1 << 29
# Adding up what all of them hold is for now and then.
OPENINGS_BETWEEN_COUNTS = 256


APART = "\n"  # in no tenant's name


def learner_of(owner: str, account: str) -> str:
    """Return the owner of a request's stores: its tenant; on an account of the pool, one that is forgotten with it.

    Args:
        owner: the request's tenant.
        account: whose time on the models it takes.
    """
    return owner if account == owner else f"{owner}{APART}{account}"


class Stores:
    """Shared state by kind and tenant. Lives next to a model; only its event loop touches it, so updates are ordered.

    Tenants never see each other's stores: what one wrote could be read out of another's drafts. Where there are too
    many stores, or too many bytes in them, the tenant that has most loses the one it opened least recently.

    Args:
        most: stores kept.
        most_bytes: kept in stores that say how large they are, by an attribute `nbytes`.
    """

    def __init__(self, most: int = MOST_STORES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._openings = 0
        self._stores: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def nbytes(self) -> int:
        """Host memory of the stores that report it, in bytes."""
        return sum(_nbytes(store) for store in self._stores.values())

    def open(self, kind: str, tenant: str, make: Callable[[], T]) -> T:
        """The tenant's store of a kind, made on first use.

        Args:
            kind: who uses it and with what shape, e.g. "token_recycling/8"; the same kind must mean the same type.
            tenant: whose it is; see `learner_of`.
            make: an empty one.
        """
        key = (kind, tenant)
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = make()
        self._stores.move_to_end(key)
        self._openings += 1
        while len(self._stores) > self._most:
            self._forget_one_of(Counter(owner for _, owner in self._stores))
        if self._openings % OPENINGS_BETWEEN_COUNTS == 0:
            self._bound_bytes()
        return cast(T, store)

    def forget(self, tenant: str) -> None:
        """Drop everything of a tenant."""
        for key in [key for key in self._stores if key[1].partition(APART)[0] == tenant]:
            del self._stores[key]

    def _bound_bytes(self) -> None:
        while self.nbytes > self._most_bytes:
            held = Counter[str]()
            for (_, tenant), store in self._stores.items():
                held[tenant] += _nbytes(store)
            self._forget_one_of(held, least=1)

    def _forget_one_of(self, held: Counter[str], least: int = 0) -> None:
        """Drop the least recently opened store, of at least `least` bytes, of the tenant that holds most."""
        most = max(held.values())
        key = next(key for key, store in self._stores.items() if held[key[1]] == most and _nbytes(store) >= least)
        del self._stores[key]


def _nbytes(store: Any) -> int:
    return int(getattr(store, "nbytes", 0))
