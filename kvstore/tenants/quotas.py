"""How many bytes each namespace holds in Redis, and what goes when it holds too many: its own oldest chunks.

Redis has no quotas. An index of each namespace lies next to the values: a sorted set of its keys by time of use, and
their sizes. Both are updated by one small script for each batch; what Redis evicted by itself is found by samples.

Values may be there that the index lacks: it could not be written, or its node came back empty. They are entered when
they are found again, and until then nothing renews their life.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.base import ByteStore
from kvstore.keys import Keyring
from kvstore.scripts import FORGET, PAGE, RECORD, SAMPLE, TOTAL
from turnout.types import Namespace

SWEPT = 32  # keys in a sample


@dataclass(frozen=True, slots=True)
class Held:
    """Contents of a namespace: bytes of values (headers and all), and number of values."""

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
        self._used: dict[Namespace, None] = {}

    def may_write(self, namespace: Namespace, size: int) -> bool:
        """Tell whether a chunk of that many bytes can ever find room; does no I/O."""
        limit = self._limit(namespace)
        return limit is None or size <= limit

    @property
    def namespaces(self) -> list[Namespace]:
        """Those in which this process wrote or found something: calls may name groups that are not configured."""
        return list(self._used)

    @property
    def ttl_ms(self) -> int:
        """Life of a value, in milliseconds."""
        return self._ttl

    def record(
        self,
        namespace: Namespace,
        written: Sequence[tuple[bytes, int]],
        used: Sequence[tuple[bytes, int]],
        deadline: float,
    ) -> int:
        """Enter what was written, in a chain's order, and evict what is over the quota, the longest unused first.

        Args:
            namespace: whose it is.
            written: keys and their sizes in bytes.
            used: keys that count as used now, in a chain's order, and their bytes at most where they are known to be
                there: then they are entered if they are not yet. With 0 those that the index lacks are ignored.
            deadline: monotonic.

        Returns:
            How many values were evicted.
        """
        self._used[namespace] = None
        limit = self._limit(namespace)
        now = int(1000 * self._wall())
        args: list[bytes | int | str] = [now, 2 * self._ttl, -1 if limit is None else limit, len(written)]
        for place, (key, size) in enumerate(written, start=len(used)):
            args += [self._score(now, place), size, key]
        for place, (key, size) in enumerate(used):
            args += [self._score(now, place), size, key]
        _, _, lost = self._store.script(RECORD, self._keys(namespace), args, deadline)
        if lost:  # forgotten when they are gone, not before: nothing else would ever remove them
            self._store.delete(lost, deadline)
            self._store.script(FORGET, self._keys(namespace), lost, deadline)
        return len(lost)

    def forget(self, namespace: Namespace, keys: Sequence[bytes], deadline: float) -> None:
        """Take out of the index what was deleted."""
        self._store.script(FORGET, self._keys(namespace), keys, deadline)

    def held(self, namespace: Namespace, deadline: float) -> Held:
        """Return what the index holds."""
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
        """Remove every value of the namespace that the index knows; how many there were.

        A node that cannot be reached is a fault: what it holds is still there and still known.
        """
        removed = 0
        while keys := self._store.script(PAGE, self._keys(namespace)[:1], [999], deadline):
            removed += self._store.delete(keys, deadline)
            self._store.script(FORGET, self._keys(namespace), keys, deadline)
        return removed

    def _score(self, now: int, place: int) -> int:
        """Return when a chunk may go: its time of expiry; a chunk goes before its ancestors."""
        return now + self._ttl - min(place, 1000)

    def _keys(self, namespace: Namespace) -> list[bytes]:
        tag = base64.urlsafe_b64encode(self._keyring.namespace_id(namespace)).rstrip(b"=")
        return [b"to1:{%s}:idx" % tag, b"to1:{%s}:sizes" % tag]
