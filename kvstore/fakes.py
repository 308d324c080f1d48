"""Byte stores for tests and trials: one in memory, one that goes wrong as planned, one that writes down its calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvstore.base import ByteStore, FaultKind, StoreFault
from kvstore.redis.reading import Done, Place

Script = Callable[["MemoryByteStore", Sequence[bytes], Sequence[bytes | int | str]], Any]


class MemoryByteStore:
    """A `ByteStore` in a dict, with lives that end by an injected clock. Thread-safe.

    Args:
        clock: seconds.
        scripts: what stands for a Lua script: its text -> a function of (store, keys, args), run under the lock.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, scripts: Mapping[str, Script] | None = None
    ) -> None:
        self._clock = clock
        self._scripts = dict(scripts or {})
        self._lock = threading.RLock()
        self._values: dict[bytes, tuple[bytes, float | None]] = {}
        self._closed = False

    def get(self, key: bytes) -> bytes | None:
        """Return a value that still lives."""
        with self._lock:
            value, end = self._values.get(key, (None, None))
            if end is not None and end <= self._clock():
                del self._values[key]
                return None
            return value

    def put(self, key: bytes, value: bytes, ttl_ms: int | None = None) -> None:
        """Set a value, there or not; None: for ever."""
        with self._lock:
            self._values[key] = (value, None if ttl_ms is None else self._clock() + ttl_ms / 1e3)

    def keys(self) -> list[bytes]:
        """Return keys that still live, in the order in which they were set."""
        with self._lock:
            return [key for key in list(self._values) if self.get(key) is not None]

    def count_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`."""
        self._check(deadline)
        missing = (i for i, key in enumerate(keys) if self.get(key) is None)
        return next(missing, len(keys))

    def read(self, keys: Sequence[bytes], place: Place, done: Done, ttl_ms: int, deadline: float) -> int:
        """See `ByteStore`."""
        self._check(deadline)
        for i, key in enumerate(keys):
            value = self.get(key)
            view = None if value is None else place(i, len(value))
            if value is None or view is None:
                return i
            view.cast("B")[:] = value
            self.touch([key], ttl_ms, deadline)
            if not done(i):
                return i + 1
        return len(keys)

    def write(self, key: bytes, parts: Sequence[memoryview | bytes], ttl_ms: int, deadline: float) -> bool:
        """See `ByteStore`."""
        self._check(deadline)
        with self._lock:
            if self.get(key) is not None:
                return False
            self.put(key, b"".join(parts), ttl_ms)
            return True

    def touch(self, keys: Sequence[bytes], ttl_ms: int | None, deadline: float) -> list[bool]:
        """See `ByteStore`."""
        self._check(deadline)
        with self._lock:
            values = [self.get(key) for key in keys]
            for key, value in zip(keys, values, strict=True):
                if value is not None:
                    self.put(key, value, ttl_ms)
            return [value is not None for value in values]

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`."""
        self._check(deadline)
        with self._lock:
            return sum(self.get(key) is not None and self._values.pop(key) is not None for key in keys)

    def script(self, text: str, keys: Sequence[bytes], args: Sequence[bytes | int | str], deadline: float) -> Any:
        """Run what stands for the script.

        Raises:
            StoreFault: refused: nothing stands for it.
        """
        self._check(deadline)
        if text not in self._scripts:
            raise StoreFault("refused", "no function stands for this script")
        with self._lock:
            return self._scripts[text](self, keys, args)

    def servers(self, deadline: float) -> list[str]:
        """See `ByteStore`: no server."""
        return []

    def reset_connections(self) -> None:
        """Do nothing: there are no connections."""

    def health(self) -> Literal["ok", "degraded", "off"]:
        """Return ok until it is closed."""
        return "off" if self._closed else "ok"

    def close(self) -> None:
        """Close; later calls end with a fault."""
        self._closed = True

    def _check(self, deadline: float) -> None:
        if self._closed:
            raise StoreFault("unreachable", "the store is closed")
        if time.monotonic() >= deadline:
            raise StoreFault("late", "the deadline passed")


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults of a store, the same way every time. Indexes count the keys of one call from 0.

    Attributes:
        drop: keys that are said to be missing, by probes and reads: `{2}` makes a gap, `range(4, 8)` a segment.
        vanish: keys that a probe still finds, and a read no more.
        truncate: values that come with their second half missing.
        flip: values of which one bit is turned.
        swap: pairs of values that come in each other's place.
        torn: values that stop in the middle: their place is half filled, and reading ends there.
        late_s: seconds before each call does anything; beyond its deadline it ends late, at the deadline.
        faults: of the calls in order, None for a good one; the last holds on.
    """

    drop: frozenset[int] = frozenset()
    vanish: frozenset[int] = frozenset()
    truncate: frozenset[int] = frozenset()
    flip: frozenset[int] = frozenset()
    swap: tuple[tuple[int, int], ...] = ()
    torn: frozenset[int] = frozenset()
    late_s: float = 0.0
    faults: tuple[FaultKind | None, ...] = ()


class PassOn:
    """A `ByteStore` that hands every call to another one; what differs is overridden.

    Args:
        inner: the store behind it.
    """

    def __init__(self, inner: ByteStore) -> None:
        self._inner = inner

    def read(self, keys: Sequence[bytes], place: Place, done: Done, ttl_ms: int, deadline: float) -> int:
        """See `ByteStore`."""
        return self._inner.read(keys, place, done, ttl_ms, deadline)

    def count_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`."""
        return self._inner.count_prefix(keys, deadline)

    def write(self, key: bytes, parts: Sequence[memoryview | bytes], ttl_ms: int, deadline: float) -> bool:
        """See `ByteStore`."""
        return self._inner.write(key, parts, ttl_ms, deadline)

    def touch(self, keys: Sequence[bytes], ttl_ms: int | None, deadline: float) -> list[bool]:
        """See `ByteStore`."""
        return self._inner.touch(keys, ttl_ms, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`."""
        return self._inner.delete(keys, deadline)

    def script(self, text: str, keys: Sequence[bytes], args: Sequence[bytes | int | str], deadline: float) -> Any:
        """See `ByteStore`."""
        return self._inner.script(text, keys, args, deadline)

    def servers(self, deadline: float) -> list[str]:
        """See `ByteStore`."""
        return self._inner.servers(deadline)

    def reset_connections(self) -> None:
        """Do nothing: there are no connections."""
        self._inner.reset_connections()

    def health(self) -> Literal["ok", "degraded", "off"]:
        """Return the health of the store behind it."""
        return self._inner.health()

    def close(self) -> None:
        """Close the store behind it."""
        self._inner.close()


class FaultyStore(PassOn):
    """A `ByteStore` that goes wrong as planned; the plan may be replaced at any time.

    Args:
        inner: the store behind it.
        plan: what goes wrong.
    """

    def __init__(self, inner: ByteStore, plan: Plan | None = None) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls = 0
        self._plan = plan or Plan()

    @property
    def plan(self) -> Plan:
        """What goes wrong; to set it counts calls from 0 again."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        with self._lock:
            self._plan, self._calls = plan, 0

    def count_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`, up to the first key that the plan drops."""
        plan = self._begin(deadline)
        found = self._inner.count_prefix(keys, deadline)
        return min([found, *(i for i in plan.drop if i < found)])

    def read(self, keys: Sequence[bytes], place: Place, done: Done, ttl_ms: int, deadline: float) -> int:
        """See `ByteStore`, with values as planned."""
        plan = self._begin(deadline)
        partner = {a: b for pair in plan.swap for a, b in (pair, pair[::-1])}
        for i in range(len(keys)):
            if i in plan.drop or i in plan.vanish:
                return i
            source = partner.get(i, i)
            value = self._fetch(keys[source], ttl_ms, deadline) if source < len(keys) else None
            if value is None:
                return i
            if i in plan.truncate:
                del value[len(value) // 2 :]
            if i in plan.flip and value:
                value[len(value) // 2] ^= 1
            view = place(i, len(value))
            if view is None:
                return i
            view = view.cast("B")
            if i in plan.torn:
                half = len(value) // 2
                view[:half] = value[:half]
                if i == 0:
                    raise StoreFault("unreachable", "planned: cut in the middle of a value")
                return i
            view[:] = value
            if not done(i):
                return i + 1
        return len(keys)

    def write(self, key: bytes, parts: Sequence[memoryview | bytes], ttl_ms: int, deadline: float) -> bool:
        """See `ByteStore`."""
        self._begin(deadline)
        return self._inner.write(key, parts, ttl_ms, deadline)

    def touch(self, keys: Sequence[bytes], ttl_ms: int | None, deadline: float) -> list[bool]:
        """See `ByteStore`."""
        self._begin(deadline)
        return self._inner.touch(keys, ttl_ms, deadline)

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`."""
        self._begin(deadline)
        return self._inner.delete(keys, deadline)

    def script(self, text: str, keys: Sequence[bytes], args: Sequence[bytes | int | str], deadline: float) -> Any:
        """See `ByteStore`."""
        self._begin(deadline)
        return self._inner.script(text, keys, args, deadline)

    def _begin(self, deadline: float) -> Plan:
        with self._lock:
            plan, call = self._plan, self._calls
            self._calls += 1
        if plan.late_s:
            time.sleep(max(min(plan.late_s, deadline - time.monotonic()), 0))
            if time.monotonic() >= deadline:
                raise StoreFault("late", "planned: too late")
        fault = plan.faults[min(call, len(plan.faults) - 1)] if plan.faults else None
        if fault is not None:
            raise StoreFault(fault, "planned")
        return plan

    def _fetch(self, key: bytes, ttl_ms: int, deadline: float) -> bytearray | None:
        held = bytearray()

        def keep(_: int, size: int) -> memoryview:
            held.extend(bytes(size))
            return memoryview(held)

        # A bytearray of which a view is held cannot change its length, so what was read is copied.
        count = self._inner.read([key], keep, lambda _: True, ttl_ms, deadline)
        return bytearray(held) if count else None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a store.

    Attributes:
        name: of the method.
        keys: it was called with.
        sizes: bytes of the values read or written, in order.
        result: what it returned; None when it ended with a fault.
        fault: how it failed; None: it did not.
    """

    name: str
    keys: tuple[bytes, ...]
    sizes: tuple[int, ...] = ()
    result: Any = None
    fault: FaultKind | None = None


class RecordingStore(PassOn):
    """A `ByteStore` that writes down each call when it ends, in that order. Thread-safe.

    Args:
        inner: the store behind it.

    Attributes:
        calls: what was called.
    """

    def __init__(self, inner: ByteStore) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []

    def named(self, name: str) -> list[Call]:
        """List the calls of one method."""
        return [call for call in list(self.calls) if call.name == name]

    def count_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`."""
        return int(self._record("count_prefix", keys, [], lambda: self._inner.count_prefix(keys, deadline)))

    def read(self, keys: Sequence[bytes], place: Place, done: Done, ttl_ms: int, deadline: float) -> int:
        """See `ByteStore`."""
        sizes: list[int] = []

        def placed(index: int, size: int) -> memoryview | None:
            view = place(index, size)
            if view is not None:
                sizes.append(size)
            return view

        return int(self._record("read", keys, sizes, lambda: self._inner.read(keys, placed, done, ttl_ms, deadline)))

    def write(self, key: bytes, parts: Sequence[memoryview | bytes], ttl_ms: int, deadline: float) -> bool:
        """See `ByteStore`."""
        sizes = [sum(memoryview(part).nbytes for part in parts)]
        return bool(self._record("write", [key], sizes, lambda: self._inner.write(key, parts, ttl_ms, deadline)))

    def touch(self, keys: Sequence[bytes], ttl_ms: int | None, deadline: float) -> list[bool]:
        """See `ByteStore`."""
        return list(self._record("touch", keys, [], lambda: self._inner.touch(keys, ttl_ms, deadline)))

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """See `ByteStore`."""
        return int(self._record("delete", keys, [], lambda: self._inner.delete(keys, deadline)))

    def script(self, text: str, keys: Sequence[bytes], args: Sequence[bytes | int | str], deadline: float) -> Any:
        """See `ByteStore`."""
        return self._record("script", keys, [], lambda: self._inner.script(text, keys, args, deadline))

    def _record(self, name: str, keys: Sequence[bytes], sizes: list[int], run: Callable[[], Any]) -> Any:
        try:
            result = run()
        except StoreFault as fault:
            self.calls.append(Call(name, tuple(keys), tuple(sizes), fault=fault.kind))
            raise
        self.calls.append(Call(name, tuple(keys), tuple(sizes), result))
        return result
