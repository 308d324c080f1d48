"""Whether asking Redis for a prefix is likely to save more than it takes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

WEIGHT = 0.2  # of the newest look-up in the mean time of those that found nothing
FADE = 0.98  # of what is known of a tenant, with each look-up: about the last fifty count
STREAK = 8  # look-ups of a tenant that found nothing, one after the other, before any is left out
TRIES = 16  # every so many that would not pay is made nevertheless: what others store is seen in no other way
MOST_TENANTS = 1024


@dataclass(slots=True)
class _Record:
    """What became of a tenant's look-ups, the older the less it counts."""

    hits: float = 0.0
    made: float = 0.0
    streak: int = 0
    left_out: int = 0


class LookupGate:
    """Compares what a look-up takes with the computing it may save. For one event loop.

    A look-up takes a round trip, two changes of thread, and, where many prompts come together, their common forward.
    So what look-ups that found nothing took of late is measured, and set against the chance of a hit, by how the
    tenant's look-ups went, times the time to compute what is missing.
    """

    def __init__(self) -> None:
        self._fruitless_s: float | None = None
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def pays(self, tenant: str, compute_s: float) -> bool:
        """Whether to look; a tenant of whom little is known is looked up for.

        Args:
            tenant: whose prompt it is.
            compute_s: predicted time to compute what is missing, in seconds.
        """
        record = self._records.get(tenant)
        if record is None or record.streak < STREAK or self._fruitless_s is None:
            return True
        if compute_s * (record.hits + 1.0) / (record.made + 2.0) >= self._fruitless_s:
            return True
        record.left_out += 1
        return record.left_out % TRIES == 0

    def looked(self, tenant: str, found: bool, seconds: float) -> None:
        """A look-up took so long, and found something or nothing."""
        record = self._records.setdefault(tenant, _Record())
        self._records.move_to_end(tenant)
        while len(self._records) > MOST_TENANTS:
            self._records.popitem(last=False)
        record.hits = FADE * record.hits + found
        record.made = FADE * record.made + 1.0
        record.streak = 0 if found else record.streak + 1
        if not found:
            old = self._fruitless_s
            self._fruitless_s = seconds if old is None else (1.0 - WEIGHT) * old + WEIGHT * seconds
