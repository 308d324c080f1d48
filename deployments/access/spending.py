"""What tenants have spent in the current day and month, by UTC."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal

from deployments.access.usage_record import UsageRecord
from deployments.access.usage_sums import Amounts, Days, day_of
from turnout.access_config import Budget

Per = Literal["day", "month"]
UNITS = ("tokens", "flops", "seconds")
KEPT_DAYS = 62


def period_start(per: Per, now: datetime) -> datetime:
    """When the period that `now` lies in began."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day if per == "day" else day.replace(day=1)


def period_end(per: Per, now: datetime) -> datetime:
    """When the next one begins."""
    start = period_start(per, now)
    return start + timedelta(days=1) if per == "day" else (start + timedelta(days=32)).replace(day=1)


class Spending:
    """Sums by day, tenant and unit. Any thread may add to them.

    Args:
        records: to begin with.
    """

    def __init__(self, records: Iterable[UsageRecord] = ()) -> None:
        self._lock = threading.Lock()
        self._days = Days()
        for record in records:
            self.add(record)

    def add(self, record: UsageRecord) -> None:
        """Count a record."""
        with self._lock:
            self._days.add(record)
            self._forget()

    def take(self, days: Mapping[str, Mapping[str, Amounts]]) -> None:
        """Count sums that others have made."""
        with self._lock:
            self._days.take(days)
            self._forget()

    def spent(self, tenant: str, budget: Budget, now: datetime) -> float:
        """What a tenant has spent of a budget."""
        first, last = day_of(period_start(budget.per, now)), day_of(now)
        unit = UNITS.index(budget.unit)
        with self._lock:
            found = (sums[tenant] for day, sums in self._days.sums.items() if first <= day <= last and tenant in sums)
            return sum(amounts[unit] for amounts in found)

    def _forget(self) -> None:
        while len(self._days.sums) > KEPT_DAYS:
            del self._days.sums[min(self._days.sums)]
