"""What a model's store counts. Any thread may count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from threading import Lock

from kvstore.types import TenantCounts

TENANTS_KEPT = 1000  # accounts of others are merged into one
OTHERS = "(others)"


class Counts:
    """Counters of one model's store."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.lookups = 0
        self.writes = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.regret_s = 0.0
        self.waits_s = 0.0
        self.hits: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._tenants: dict[str, TenantCounts] = {}

    def fault(self, kind: str) -> int:
        """Something went wrong; it was a miss. Returns how often it had happened before."""
        with self._lock:
            self.faults[kind] += 1
            return self.faults[kind] - 1

    def drop(self, reason: str) -> None:
        """An offered chunk was not stored."""
        with self._lock:
            self.dropped[reason] += 1

    def read(self, size: int) -> None:
        """A value came."""
        with self._lock:
            self.bytes_read += size

    def wrote(self, tenant: str, size: int) -> None:
        """A value was stored."""
        with self._lock:
            self.writes += 1
            self.bytes_written += size
            self._tenant(tenant).bytes_written += size

    def looked_up(self, tenant: str, asked: int, tiers: tuple[str, ...], chunk_tokens: int) -> None:
        """A sequence was looked up: `asked` chunks were wanted, and so many were found."""
        with self._lock:
            self.lookups += 1
            for tier in tiers:
                self.hits[tier] += 1
                self.tokens[tier] += chunk_tokens
            account = self._tenant(tenant)
            account.lookups += 1
            account.hits += bool(tiers)
            account.tokens_asked += asked * chunk_tokens
            account.tokens_found += len(tiers) * chunk_tokens

    def outcome(self, regret_s: float, waited_s: float) -> None:
        """What a decision turned out to cost beyond the best other one, and the time spent waiting for others."""
        with self._lock:
            self.regret_s += regret_s
            self.waits_s += waited_s

    def tenants(self) -> dict[str, TenantCounts]:
        """Copies of the accounts, those that asked for the most first."""
        with self._lock:
            accounts = {name: replace(account) for name, account in self._tenants.items()}
        return dict(sorted(accounts.items(), key=lambda item: -item[1].tokens_asked))

    def _tenant(self, name: str) -> TenantCounts:
        if name not in self._tenants and len(self._tenants) >= TENANTS_KEPT:
            name = OTHERS
        return self._tenants.setdefault(name, TenantCounts())
