"""What has changed of an object with its state in attributes, on either side of a wire, and writing it into the other.

What light attributes became comes back and is written into the original in place. Heavy ones, tensors and everything of
more than LIGHT bytes, stay beside the model. A class whose objects work at several models in turn says in
`carried_bytes` how much an attribute of theirs may have and still come back; values of a class with `is_constant` never
change, and are sent to each actor once.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from decoding.state import PLAIN, attributes, is_constant, is_frozen, settle

LIGHT = 1024  # bytes of an attribute beyond which it does not come back, unless its object says otherwise

NUMBERS = frozenset({int, float, bool, type(None)})
SHALLOW: dict[type, Callable[[Any], Any]] = {list: tuple, tuple: tuple, deque: tuple, set: frozenset}
FEW = 64  # numbers that are compared one by one

AWAY = object()  # stands for a value that can change or must be able to go
UNSEEN = (AWAY, AWAY)
HEAVY = ""  # in changes: names of attributes that have become heavy
Changes = dict[str, Any]


class _TooHeavyError(Exception):
    pass


class _LightPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or is_constant(value):
            raise _TooHeavyError
        return NotImplemented


def _light(value: Any, most: int) -> bytes | None:
    """A value's bytes; None where they are more than `most`, or cannot be made."""
    buffer = io.BytesIO()
    try:
        _LightPickler(buffer, protocol=5).dump(value)
    except (_TooHeavyError, pickle.PicklingError, TypeError, AttributeError):
        return None
    return buffer.getvalue() if buffer.tell() <= most else None


def _stamp(value: Any, most: int) -> Any:
    """What tells whether a value is still the same; None: it is heavy."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in SHALLOW and len(value) <= FEW and all(type(each) in NUMBERS for each in value):
        return kind, SHALLOW[kind](value)
    return _light(value, most)


class Watch:
    """What both sides know of one part.

    Args:
        part: the part as it was sent, or came.
        back: this is the side beside the model, where heavy attributes have their home and are not looked into; the
            names of those that have become heavy are told once, as HEAVY.
    """

    def __init__(self, part: Any, back: bool = False) -> None:
        self._back = back
        self._most: int = getattr(type(part), "carried_bytes", LIGHT)
        self._seen: dict[str, tuple[Any, Any]] = {}  # the object where it cannot change, and its stamp
        for name, value in attributes(part).items():
            self._look(name, value)

    @property
    def resides(self) -> bool:
        """Whether state that may change is heavy."""
        return any(stamp is None and not is_constant(seen) for seen, stamp in self._seen.values())

    def changed(self, part: Any) -> Changes:
        """Attributes of the part that are not as they were at the last look."""
        changes: Changes = {}
        heavy: list[str] = []
        for name, value in attributes(part).items():
            if self._seen.get(name, UNSEEN)[0] is not value and self._look(name, value):
                if self._back and self._seen[name][1] is None:
                    heavy.append(name)
                else:
                    changes[name] = value
        if heavy:
            changes[HEAVY] = heavy
        return changes

    def unsee(self, names: Iterable[str]) -> None:
        """These attributes were not told after all: they have changed at the next look."""
        for name in names:
            self._seen.pop(name, None)

    def _look(self, name: str, value: Any) -> bool:
        """Whether an attribute has changed."""
        known = self._seen.get(name, UNSEEN)
        kind = type(value)
        if self._back and known[1] is None and kind not in PLAIN:
            return False
        stamp = _stamp(value, self._most)
        if stamp is not None and stamp == known[1]:
            return False
        keeps = kind in PLAIN or is_frozen(kind) or (stamp is None and not self._back)
        self._seen[name] = (value if keeps else AWAY, stamp)
        return True

    def take(self, part: Any, changes: Changes) -> None:
        """Write what the other side changed into the part; objects that others hold too stay the same objects."""
        for name, value in changes.items():
            if name != HEAVY:
                object.__setattr__(part, name, settle(getattr(part, name, None), value))
                self._look(name, getattr(part, name))
