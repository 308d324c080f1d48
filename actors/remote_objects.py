"""Components of a method at a remote model: sent in full once, then named by number, and their state where it changes.

Drafters, length policies, verifiers and stop rules are ordinary objects; `decoding.state` says what their state is. The
actor keeps a copy of each until the original is garbage. The copy of a drafter also holds its working memory (stores,
n-grams, hidden states), which never travels; a copy that is made anew starts without it.
"""

from __future__ import annotations

import io
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from decoding.state import is_constant, load_state, state_of


class Constants:
    """Values that are sent once to each incarnation of an actor and named by number from then on: heads, wants.

    One for all members of a replica. Weights are identified by object, everything else by value.
    """

    MOST = 4096

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._modules: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._values: dict[Any, int] = {}
        self._blobs: dict[int, Callable[[], bytes]] = {}

    def module(self, module: Any) -> int:
        """Return the number of a network, or of another value identified by object."""
        number = self._modules.get(module)
        if number is None:
            number = self._modules[module] = next(self._numbers)
            there = weakref.ref(module)
            self._blobs[number] = lambda: pickle.dumps(there(), protocol=5)
        return number

    def value(self, value: Any) -> int | None:
        """Return the number of a hashable value; None: there are too many already."""
        number = self._values.get(value)
        if number is None and len(self._values) < self.MOST:
            number = self._values[value] = next(self._numbers)
            self._blobs[number] = lambda: pickle.dumps(value, protocol=5)
        return number

    def blob(self, number: int) -> bytes:
        """Return the value's bytes."""
        return self._blobs[number]()


class _ObjectPickler(pickle.Pickler):
    """Writes networks and other constants by number."""

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
    """Stand in the bytes for a constant; `_ObjectUnpickler` never calls it."""
    raise TypeError("bytes with constants in them are read by Receiver only")


class _ObjectUnpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, constants: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self._constants = constants

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _constant.__name__:
            return self._constants.__getitem__
        return super().find_class(module, name)


class ObjectNumbers:
    """Numbers of the components that have been sent, while they exist. One for all members of a replica.

    Args:
        constants: of the same replica.
    """

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._numbers = itertools.count(1)
        self._known: dict[int, int] = {}  # by id
        self._listeners: list[weakref.WeakMethod[Callable[[int], None]]] = []

    def of(self, part: Any) -> int:
        """Return a component's number; 0: its end cannot be observed, so it is sent in full every time."""
        number = self._known.get(id(part))
        if number is None:
            try:
                weakref.finalize(part, self._collected, id(part)).atexit = False
            except TypeError:
                return 0
            number = self._known[id(part)] = next(self._numbers)
        return number

    def on_collected(self, callback: Callable[[int], None]) -> None:
        """Call a bound method with the number of every component that is garbage, as long as its object exists."""
        self._listeners.append(weakref.WeakMethod(callback))

    def _collected(self, key: int) -> None:
        number = self._known.pop(key)
        for listener in list(self._listeners):
            callback = listener()
            if callback is None:
                self._listeners.remove(listener)
            else:
                callback(number)


# Number; (number or 0, the whole object) where the actor lacks it; (number, None, state) where that has changed.
Packed = int | tuple[int, bytes] | tuple[int, None, bytes]

UNSENT = object()


def _state(part: Any) -> bytes:
    """Return a component's state as bytes; none where it has none."""
    state = state_of(part)
    return _bytes(state) if state else b""


class Sender:
    """The components that one incarnation of an actor has copies of; on the coordinator.

    Args:
        numbers: of the replica.
        send_constant: called with the number and bytes of a constant that the actor lacks, before it is used.
    """

    def __init__(self, numbers: ObjectNumbers, send_constant: Callable[[int, bytes], None]) -> None:
        self._numbers = numbers
        self._send = send_constant
        self._sent: set[int] = set()
        self._states: dict[int, bytes | None] = {}  # of the copies; None: unknown
        self._collected: deque[int] = deque()  # any thread may collect garbage
        numbers.on_collected(self._drop)

    def _drop(self, number: int) -> None:
        if self._states.pop(number, UNSENT) is not UNSENT:
            self._collected.append(number)

    def take_collected(self) -> list[int]:
        """Return the numbers of components that are garbage here, each once."""
        return [self._collected.popleft() for _ in range(len(self._collected))]

    def constant(self, number: int) -> int:
        """Make sure that the actor has a constant."""
        if number not in self._sent:
            self._sent.add(number)
            self._send(number, self._numbers.constants.blob(number))
        return number

    def number(self, value: Any) -> int | None:
        """Return the number of a value that the actor has from now on; None: there are too many."""
        number = self._numbers.constants.value(value)
        return None if number is None else self.constant(number)

    def network(self, module: Any) -> int:
        """Return the number of a network, which the actor has from now on."""
        return self.constant(self._numbers.constants.module(module))

    def invalidate(self, *parts: Any) -> None:
        """Note that the state of the actor's copies is unknown: the next call sends the whole objects."""
        for number in map(self._numbers.of, parts):
            if number in self._states:
                self._states[number] = None

    def pack(self, part: Any) -> Packed:
        """Return what the actor lacks of a component.

        Raises:
            Exception: pickling the component, or its state, failed.
        """
        number = self._numbers.of(part)
        known = self._states.get(number)
        state = _state(part)
        if known is not None and number:
            if state == known:
                return number
            self._states[number] = state
            return number, None, state
        buffer = io.BytesIO()
        pickler = _ObjectPickler(buffer, self._numbers.constants)
        pickler.dump(part)
        for each in sorted(pickler.used):
            self.constant(each)
        if number:
            self._states[number] = state
        return number, buffer.getvalue()

    def receive(self, part: Any, state: bytes) -> Any:
        """Note the new state of the actor's copy, and return it as a value."""
        value = pickle.loads(state)
        number = self._numbers.of(part)
        if number in self._states:
            self._states[number] = _bytes(value)  # as it will be pickled where the original has taken it over
        return value


def _bytes(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


@dataclass(slots=True)
class ObjectCopy:
    """A component of the coordinator's on an actor, and its state as both sides know it."""

    part: Any
    known: bytes

    def load(self, state: bytes) -> None:
        """Take over a state that the coordinator sent."""
        load_state(self.part, pickle.loads(state))
        self.known = _state(self.part)

    def changed(self) -> bytes | None:
        """Return its state where the coordinator does not know it yet."""
        state = _state(self.part)
        if state == self.known:
            return None
        self.known = state
        return state


class Receiver:
    """The copies of components, and the constants, of one incarnation of an actor; on the actor."""

    def __init__(self) -> None:
        self.constants: dict[int, Any] = {}
        self._copies: dict[int, ObjectCopy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def add_constant(self, number: int, blob: bytes) -> None:
        """Take a constant."""
        self.constants[number] = pickle.loads(blob)

    def unpack(self, packed: Packed) -> ObjectCopy:
        """Return the copy of a component, with the state that the coordinator's has."""
        if isinstance(packed, int):
            return self._copies[packed]
        number, blob, *state = packed
        if blob is None:
            copy = self._copies[number]
            copy.load(state[0])
            return copy
        part = _ObjectUnpickler(blob, self.constants).load()
        copy = ObjectCopy(part, _state(part))
        if number:
            self._copies[number] = copy
        return copy

    def forget(self, numbers: list[int]) -> None:
        """Drop copies whose originals are garbage."""
        for number in numbers:
            self._copies.pop(number, None)
