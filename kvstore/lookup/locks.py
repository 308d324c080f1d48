"""Single flight across processes: who computes a prefix says so in Redis, and others wait for it a little.

The lock lies on the first chunk that is missing and walks on with the one who computes: when a chunk is stored,
the lock on the next is taken before, so that others take chunks as they appear. A lock that
is not freed expires, and every wait is bounded, lock or not.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from kvstore.base import ByteStore, StoreFault
from kvstore.scripts import FREE

LEAST_LIFE_S = 0.1
MOST_LIFE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Held:
    following: tuple[bytes, ...]  # digests of the chunks that the same request computes after this one
    until: float


class ComputeLocks:
    """The locks of one process. Any thread may call; what does I/O says so.

    Args:
        store: where they lie.
        clock: monotonic, seconds.
    """

    def __init__(self, store: ByteStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._token = base64.b64encode(secrets.token_bytes(12))
        self._held: dict[bytes, _Held] = {}
        self._lock = Lock()

    def holds(self, digest: bytes) -> bool:
        """Tell whether this process computes the chunk: then its own cache will have it soon."""
        with self._lock:
            held = self._held.get(digest)
            return held is not None and held.until > self._clock()

    def take(self, digests: Sequence[bytes], life_s: float, deadline: float) -> bool:
        """Take the lock on the first of the chunks that are missing; False: another process has it. Does I/O.

        Raises:
            StoreFault: the store does not answer.
        """
        life_s = min(max(life_s, LEAST_LIFE_S), MOST_LIFE_S)
        if not self._store.write(_key(digests[0]), [self._token], int(1000 * life_s), deadline):
            return False
        now = self._clock()
        with self._lock:
            for digest in [each for each, held in self._held.items() if held.until <= now]:
                del self._held[digest]
            self._held[digests[0]] = _Held(tuple(digests[1:]), now + life_s)
        return True

    def ahead(self, digest: bytes, deadline: float) -> None:
        """Take the lock on the next chunk before this one is stored, if the lock on this is ours. Does I/O.

        Raises:
            StoreFault: the store does not answer.
        """
        with self._lock:
            held = self._held.get(digest)
        if held is not None and held.following and held.until > self._clock():
            self.take(held.following, held.until - self._clock(), deadline)

    def ended(self, digest: bytes, deadline: float) -> None:
        """Free the lock on a chunk that is in Redis, or will not be, if it is ours. Does I/O."""
        with self._lock:
            held = self._held.pop(digest, None)
        if held is not None:
            self._free(digest, deadline)

    def __len__(self) -> int:
        return len(self._held)

    def _free(self, digest: bytes, deadline: float) -> None:
        try:
            self._store.script(FREE, [_key(digest)], [self._token], deadline)
        except StoreFault:
            return  # it expires


def _key(digest: bytes) -> bytes:
    return b"to1:lk:" + base64.urlsafe_b64encode(digest).rstrip(b"=")
