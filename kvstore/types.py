"""Types between engine and store: chunks wanted, found and offered, and the counters of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal

import torch

from kvstore.keys import Chain, Link

Health = Literal["ok", "degraded", "off"]
Tier = Literal["memory", "redis"]
TENANTS_KEPT = 1000  # accounts of others are merged into one
OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Properties of a model that the store depends on.

    Attributes:
        fingerprint_parts: everything that its keys and values depend on (digests, dtype, layout, numerics): any
            change makes other keys.
        layers: of the cache.
        kv_heads: key/value heads.
        head_dim: width of a head.
        dtype: of the cache.
        block_size: tokens in a block of the engine's pool.
        profiles: what codecs know of this model, by codec family.
    """

    fingerprint_parts: Mapping[str, str | int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    profiles: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence whose cache is to be filled from the store.

    Attributes:
        tokens: the sequence so far.
        chain: its digests, kept with the sequence.
        held: leading tokens whose KV the engine has already.
        lossy: whether values of lossy codecs may be used.
        tenant: whose request it is, for the accounts.
        seconds: (a, b) -> predicted time to compute tokens a to b - 1 after those before them, load included.
        step: most tokens that a forward of the engine computes: what another engine computes comes in such pieces.
    """

    tokens: list[int]
    chain: Chain
    held: int
    lossy: bool
    tenant: str
    seconds: Callable[[int, int], float]
    step: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Consecutive chunks.

    Attributes:
        start: token index at which the first begins, a chunk boundary at or before what was held.
        chunks: each [layers, chunk_tokens, 2, kv_heads, head_dim] on the CPU; shared with others, not to be written.
        lossy: whether any came through a lossy codec.
        tiers: where each was.
    """

    start: int
    chunks: list[torch.Tensor]
    lossy: bool = False
    tiers: tuple[Tier, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """A chunk that was computed exactly.

    Attributes:
        link: which chunk.
        tenant: who pays for it.
        read: called at most once, in a thread: the chunk's kv [layers, chunk_tokens, 2, kv_heads, head_dim], a copy.
        done: called exactly once, from any thread, when it is read or dropped.
        before: the chunk's ancestors from the first on, where they are at hand: they are kept longer than it.
    """

    link: Link
    tenant: str
    read: Callable[[], torch.Tensor]
    done: Callable[[], None]
    before: Sequence[Link] = ()


@dataclass(slots=True)
class TenantCounts:
    """Look-ups of one tenant in this process.

    Attributes:
        lookups: sequences looked up.
        hits: those for which something was found.
        tokens_asked: tokens in the chunks that were looked for.
        tokens_found: tokens in the chunks that were found.
        bytes_written: stored in Redis.
    """

    lookups: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_found: int = 0
    bytes_written: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a model's store since it was made.

    Attributes:
        lookups: sequences looked up.
        hits: chunks found, by tier.
        tokens: tokens in them, by tier.
        faults: what went wrong, by kind: those of `StoreFault`, of `ValueRefused` ("header", "tag", ...), "codec" and
            "internal".
        dropped: chunks offered and not stored, by reason: "queue", "closed", "quota", "unreachable", "fault".
        writes: values stored in Redis.
        bytes_read: from Redis.
        bytes_written: to Redis.
        memory_bytes: held by the host tier, all models together.
        regret_s: time that another choice between fetching and computing would have saved, by the estimates, summed.
        waits_s: time spent waiting for another process to compute a prefix.
        drift: share of the quota index whose values are gone, by the last sample.
        health: of Redis: ok, degraded or off.
        servers: product, version and place of each, as they last said it.
        tenants: by name, those that ask for the most first.
    """

    lookups: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    memory_bytes: int = 0
    regret_s: float = 0.0
    waits_s: float = 0.0
    drift: float = 0.0
    health: Health = "off"
    servers: tuple[str, ...] = ()
    tenants: Mapping[str, TenantCounts] = field(default_factory=dict)


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
        """Count a fault, which was a miss; return how often it had happened before."""
        with self._lock:
            self.faults[kind] += 1
            return self.faults[kind] - 1

    def drop(self, reason: str) -> None:
        """Count an offered chunk that was not stored."""
        with self._lock:
            self.dropped[reason] += 1

    def read(self, size: int) -> None:
        """Count a value that came."""
        with self._lock:
            self.bytes_read += size

    def wrote(self, tenant: str, size: int) -> None:
        """Count a value that was stored."""
        with self._lock:
            self.writes += 1
            self.bytes_written += size
            self._tenant(tenant).bytes_written += size

    def looked_up(self, tenant: str, asked: int, tiers: tuple[str, ...], chunk_tokens: int) -> None:
        """Count a look-up of `asked` chunks and those found."""
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
        """Add the cost of a decision beyond the best other one, and the time spent waiting for others."""
        with self._lock:
            self.regret_s += regret_s
            self.waits_s += waited_s

    def tenants(self) -> dict[str, TenantCounts]:
        """Copy the accounts, those that asked for the most first."""
        with self._lock:
            accounts = {name: replace(account) for name, account in self._tenants.items()}
        return dict(sorted(accounts.items(), key=lambda item: -item[1].tokens_asked))

    def _tenant(self, name: str) -> TenantCounts:
        if name not in self._tenants and len(self._tenants) >= TENANTS_KEPT:
            name = OTHERS
        return self._tenants.setdefault(name, TenantCounts())
