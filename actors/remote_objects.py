"""Parts of a method beside a model elsewhere: sent whole once, then only what changed of them, in both directions.

Stop rules, drafters, length policies and verifiers are ordinary objects with their state in attributes. An actor keeps
its copy as long as the coordinator has the original; what becomes of them there comes back, see `actors.state_diff`.
"""

from __future__ import annotations

import io
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from actors.state_diff import HEAVY, Changes, Watch
from decoding.state import is_constant


class Constants:
    """Values that are sent once to each life of an actor and named by number from then on: weights of heads, wants.

    One for all members of a replica. Weights are told apart by identity, everything else by value.
    """

    MOST = 4096

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._modules: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._values: dict[Any, int] = {}
        self._blobs: dict[int, Callable[[], bytes]] = {}

    def module(self, module: Any) -> int:
        """The number of a network, or of another value told apart by identity."""
        number = self._modules.get(module)
        if number is None:
            number = self._modules[module] = next(self._numbers)
            there = weakref.ref(module)
            self._blobs[number] = lambda: pickle.dumps(there(), protocol=5)
        return number

    def value(self, value: Any) -> int | None:
        """The number of a hashable value; None: there are too many already."""
        number = self._values.get(value)
        if number is None and len(self._values) < self.MOST:
            number = self._values[value] = next(self._numbers)
            self._blobs[number] = lambda: pickle.dumps(value, protocol=5)
        return number

    def blob(self, number: int) -> bytes:
        """The value's bytes."""
        return self._blobs[number]()


class _WholePickler(pickle.Pickler):
    """Networks and other constants by number."""

    def __init__(self, buffer: io.BytesIO, constants: Constants) -> None:
        super().__init__(buffer, protocol=5)
        self._constants = constants
        self.used: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if is_constant(value):
            number = self._constants.module(value)
            self.used.add(number)
            return _constant, (number,)
        return NotImplemented


def _constant(number: int) -> NoReturn:
    """Stands in the bytes for a constant; `_WholeUnpickler` never calls it."""
    raise TypeError("bytes with constants in them are read by Arrivals only")


class _WholeUnpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, constants: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self._constants = constants

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _constant.__name__:
            return self._constants.__getitem__
        return super().find_class(module, name)


@dataclass(slots=True)
class _Birth:
    """A part as it was first sent anywhere, and what the coordinator itself changed since.

    A part whose state lies partly at an actor that has died starts there anew as it was born; see `Departures.pack`.
    """

    number: int
    blob: bytes
    constants: set[int]
    written: Changes = field(default_factory=dict)
    heavy: bool = False


class Births:
    """Numbers of the parts that have travelled, while they exist. One for all members of a replica.

    Args:
        constants: of the same replica.
    """

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._numbers = itertools.count(1)
        self._births: dict[int, _Birth] = {}
        self._watchers: list[weakref.WeakMethod[Callable[[int], None]]] = []

    def of(self, part: Any) -> _Birth | None:
        """What is known of a part; None: it cannot be told when it is gone, and travels whole every time."""
        birth = self._births.get(id(part))
        if birth is None:
            birth = _Birth(next(self._numbers), *self.whole(part))
            try:
                weakref.finalize(part, self._gone, id(part)).atexit = False
            except TypeError:
                return None
            self._births[id(part)] = birth
        return birth

    def whole(self, part: Any) -> tuple[bytes, set[int]]:
        """A part's bytes, and the constants they name."""
        buffer = io.BytesIO()
        pickler = _WholePickler(buffer, self.constants)
        pickler.dump(part)
        return buffer.getvalue(), pickler.used

    def watch(self, gone: Callable[[int], None]) -> None:
        """Have a bound method called with the number of every part that is gone, as long as its object exists."""
        self._watchers.append(weakref.WeakMethod(gone))

    def _gone(self, key: int) -> None:
        birth = self._births.pop(key)
        for watcher in list(self._watchers):
            gone = watcher()
            if gone is None:
                self._watchers.remove(watcher)
            else:
                gone(birth.number)


# number (0: no number), whole bytes or None where it is there, pickled changes since, None where there are none.
Packed = tuple[int, bytes | None, bytes | None]


UNSENT = object()


class Departures:
    """The parts of one life of one actor, on the coordinator.

    Args:
        births: of the replica.
        send_constant: called with the number and bytes of a constant that the actor lacks, before the part is sent.
    """

    def __init__(self, births: Births, send_constant: Callable[[int, bytes], None]) -> None:
        self._births = births
        self._send = send_constant
        self._sent: set[int] = set()
        self._watches: dict[int, Watch | None] = {}  # None: what is there is not as this side thinks
        self._forgotten: deque[int] = deque()  # any thread may collect garbage
        births.watch(self._gone)

    def _gone(self, number: int) -> None:
        if self._watches.pop(number, UNSENT) is not UNSENT:
            self._forgotten.append(number)

    def take_forgotten(self) -> list[int]:
        """Numbers of parts that nobody has any more, each once."""
        return [self._forgotten.popleft() for _ in range(len(self._forgotten))]

    def constant(self, number: int) -> int:
        """Make sure that the actor has a constant."""
        if number not in self._sent:
            self._sent.add(number)
            self._send(number, self._births.constants.blob(number))
        return number

    def number(self, value: Any) -> int | None:
        """The number of a value that the actor has from now on; None: there are too many."""
        number = self._births.constants.value(value)
        return None if number is None else self.constant(number)

    def distrust(self, part: Any) -> None:
        """What becomes of a part there is not told here: it is sent whole the next time."""
        birth = self._births.of(part)
        if birth is not None and birth.number in self._watches:
            self._watches[birth.number] = None

    def pack(self, part: Any) -> Packed:
        """What the actor lacks of a part.

        Raises:
            Exception: whatever pickling the part, or what changed of it, failed with.
        """
        birth = self._births.of(part)
        if birth is None:
            blob, used = self._births.whole(part)
            for number in sorted(used):
                self.constant(number)
            return 0, blob, None
        watch = self._watches.get(birth.number)
        if watch is not None:
            changes = watch.changed(part)
            try:
                packed = pickle.dumps(changes, protocol=5) if changes else None
            except Exception:
                watch.unsee(changes)
                raise
            birth.written.update(changes)
            return birth.number, None, packed
        watch = Watch(part)
        heavy = birth.heavy or watch.resides
        blob, used = (birth.blob, birth.constants) if heavy else self._births.whole(part)
        for number in sorted(used):
            self.constant(number)
        packed = pickle.dumps(birth.written, protocol=5) if heavy and birth.written else None
        self._watches[birth.number], birth.heavy = watch, heavy
        return birth.number, blob, packed

    def take(self, part: Any, changes: Changes, into: Any = None) -> None:
        """Write what became of a part into it, or into a twin of it whose state it will take over."""
        birth = self._births.of(part)
        watch = self._watches.get(birth.number) if birth is not None else None
        if birth is not None and changes.get(HEAVY):
            birth.heavy = True
        (watch or Watch(part)).take(part if into is None else into, changes)


class Arrivals:
    """The parts and constants of one life of one actor, there."""

    def __init__(self) -> None:
        self.constants: dict[int, Any] = {}
        self._parts: dict[int, tuple[Any, Watch]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add_constant(self, number: int, blob: bytes) -> None:
        """A constant came."""
        self.constants[number] = pickle.loads(blob)

    def unpack(self, packed: Packed) -> tuple[Any, Watch]:
        """The part here, as it is at the coordinator."""
        number, blob, changes = packed
        if blob is not None:
            part = _WholeUnpickler(blob, self.constants).load()
            watch = Watch(part, back=True)
            if number:
                self._parts[number] = part, watch
        else:
            part, watch = self._parts[number]
        if changes:
            watch.take(part, pickle.loads(changes))
        return part, watch

    def forget(self, numbers: list[int]) -> None:
        """Nobody has these parts any more."""
        for number in numbers:
            self._parts.pop(number, None)
