"""How many bytes each namespace holds in Redis, and what goes when it holds too many: its own oldest chunks.

Redis has no quotas. Beside the values lies an index of each namespace: a sorted set of its keys by time of use, and
their sizes. Both are updated by one small script for each batch; what Redis evicted by itself is found by samples.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.base import ByteStore
from kvstore.keys import Keyring
from turnout.types import Namespace

SWEPT = 32  # keys in a sample

# KEYS: index, sizes. The total lies in the sizes under "". ARGV: now, quota or -1, number of keys that were written,
# then (score, size, key) of each, then (score, key) of those that were used.
# Returns the total, the number of keys, and those that the namespace lost.
RECORD = """
local index, sizes = KEYS[1], KEYS[2]
local function drop(key)
  redis.call('zrem', index, key)
  redis.call('hincrby', sizes, '', -(tonumber(redis.call('hget', sizes, key)) or 0))
  redis.call('hdel', sizes, key)
end
local last = 3 + 3 * tonumber(ARGV[3])
for i = 4, last, 3 do
  local old = tonumber(redis.call('hget', sizes, ARGV[i + 2]) or 0)
  redis.call('zadd', index, ARGV[i], ARGV[i + 2])
  redis.call('hset', sizes, ARGV[i + 2], ARGV[i + 1])
  redis.call('hincrby', sizes, '', tonumber(ARGV[i + 1]) - old)
end
for i = last + 1, #ARGV, 2 do
  redis.call('zadd', index, 'xx', ARGV[i], ARGV[i + 1])
end
for _, key in ipairs(redis.call('zrangebyscore', index, '-inf', ARGV[1], 'limit', 0, 200)) do
  drop(key)
end
local lost, quota = {}, tonumber(ARGV[2])
while quota >= 0 and tonumber(redis.call('hget', sizes, '') or 0) > quota do
  local oldest = redis.call('zrange', index, 0, 0)[1]
  if not oldest then break end
  drop(oldest)
  lost[#lost + 1] = oldest
end
return {tonumber(redis.call('hget', sizes, '') or 0), redis.call('zcard', index), lost}
"""

# KEYS: index, sizes. ARGV: keys that are gone. Returns the total and the number of keys.
FORGET = """
for _, key in ipairs(ARGV) do
  if redis.call('zrem', KEYS[1], key) == 1 then
    redis.call('hincrby', KEYS[2], '', -(tonumber(redis.call('hget', KEYS[2], key)) or 0))
    redis.call('hdel', KEYS[2], key)
  end
end
return {tonumber(redis.call('hget', KEYS[2], '') or 0), redis.call('zcard', KEYS[1])}
"""

SAMPLE = "return redis.call('zrandmember', KEYS[1], ARGV[1])"
PAGE = "return redis.call('zrange', KEYS[1], 0, ARGV[1])"
TOTAL = "return {tonumber(redis.call('hget', KEYS[2], '') or 0), redis.call('zcard', KEYS[1])}"


@dataclass(frozen=True, slots=True)
class Held:
    """What a namespace holds: bytes of values (headers and all), and how many values."""

    bytes: int
    values: int


class Quotas:
    """The index of the namespaces, and their limits. Does I/O; any thread may call; every method raises `StoreFault`.

    Args:
        store: where index and values lie.
        keyring: the store's keys.
        limit: a namespace's most bytes; None: no limit.
        ttl_ms: life of a value.
        wall_clock: seconds since the epoch: several processes write scores.
    """

    def __init__(
        self,
        store: ByteStore,
        keyring: Keyring,
        limit: Callable[[Namespace], int | None],
        ttl_ms: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._limit = limit
        self._ttl = ttl_ms
        self._wall = wall_clock

    def may_write(self, namespace: Namespace, size: int) -> bool:
        """Whether a chunk of so many bytes can ever find room; does no I/O."""
        limit = self._limit(namespace)
        return limit is None or size <= limit

    @property
    def ttl_ms(self) -> int:
        """Life of a value, in milliseconds."""
        return self._ttl

    def record(
        self,
        namespace: Namespace,
        written: Sequence[tuple[bytes, int]],
        used: Sequence[bytes],
        deadline: float,
    ) -> int:
        """Enter what was written, in a chain's order, and evict what is over the quota, the longest unused first.

        Args:
            namespace: whose it is.
            written: keys and their sizes in bytes.
            used: keys that count as used now, in a chain's order; those that are not there are ignored.
            deadline: monotonic.

        Returns:
            How many values were evicted.
        """
        limit = self._limit(namespace)
        now = int(1000 * self._wall())
        args: list[bytes | int | str] = [now, -1 if limit is None else limit, len(written)]
        for place, (key, size) in enumerate(written, start=len(used)):
            args += [self._score(now, place), size, key]
        for place, key in enumerate(used):
            args += [self._score(now, place), key]
        _, _, lost = self._store.script(RECORD, self._keys(namespace), args, deadline)
        if lost:
            self._store.delete(lost, deadline)
        return len(lost)

    def held(self, namespace: Namespace, deadline: float) -> Held:
        """What the index says."""
        size, values = self._store.script(TOTAL, self._keys(namespace), [], deadline)
        return Held(int(size), int(values))

    def sweep(self, namespace: Namespace, deadline: float) -> float:
        """Look whether a sample of the index is still there, and forget what is not.

        Returns:
            Share of the sample that was gone.
        """
        sample = self._store.script(SAMPLE, self._keys(namespace)[:1], [SWEPT], deadline)
        if not sample:
            return 0.0
        gone: list[bytes] = []
        start = 0
        while start < len(sample):
            start += self._store.count_prefix(sample[start:], deadline)
            gone += sample[start : start + 1]
            start += 1
        if gone:
            self._store.script(FORGET, self._keys(namespace), gone, deadline)
        return len(gone) / len(sample)

    def flush(self, namespace: Namespace, deadline: float) -> int:
        """Remove every value of the namespace that the index knows; how many there were."""
        removed = 0
        while keys := self._store.script(PAGE, self._keys(namespace)[:1], [999], deadline):
            removed += self._store.delete(keys, deadline)
            self._store.script(FORGET, self._keys(namespace), keys, deadline)
        return removed

    def _score(self, now: int, place: int) -> int:
        """When it may go: its time of expiry; a chunk goes before its ancestors."""
        return now + self._ttl - min(place, 1000)

    def _keys(self, namespace: Namespace) -> list[bytes]:
        tag = base64.urlsafe_b64encode(self._keyring.namespace_id(namespace)).rstrip(b"=")
        return [b"to1:{%s}:idx" % tag, b"to1:{%s}:sizes" % tag]
