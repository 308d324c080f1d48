"""State of an object in its attributes: as a value, in an independent twin, and written back.

Values of a class with `is_constant` never change, and are shared by all twins.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

PLAIN = frozenset({int, float, str, bool, bytes, type(None)})

_SLOTS: dict[type, tuple[str, ...]] = {}
_FROZEN: dict[type, bool] = {}


class Stateful:
    """An object with state that an operation gives back as a value: drafters, length policies, stop rules.

    Attributes:
        changing: names of the attributes that are its state: what its caller reads or writes between operations. All
            others are set before the first operation, or are working memory next to the model, which starts empty when
            that model starts again.
    """

    changing: ClassVar[tuple[str, ...]] = ()

    def state(self) -> tuple[Any, ...]:
        """Return the values of `changing`; picklable, and small: they travel whenever they differ."""
        return tuple([getattr(self, name) for name in self.changing])

    def load_state(self, state: tuple[Any, ...]) -> None:
        """Take over what `state` returned; objects that others hold too stay the same objects."""
        for name, value in zip(self.changing, state, strict=True):
            setattr(self, name, settle(getattr(self, name, None), value))


class ConstantDict(dict[K, V]):
    """A dictionary that never changes, one object wherever it is used."""

    is_constant = True

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def is_constant(value: Any) -> bool:
    """Return whether a value never changes and is sent to each actor once: networks, and what says so of itself."""
    return isinstance(value, torch.nn.Module) or getattr(type(value), "is_constant", False) is True


def attributes(part: Any) -> dict[str, Any]:
    """An object's attributes, those in slots included; not to be changed."""
    slots = _slots(type(part))
    if not slots:
        own: dict[str, Any] = part.__dict__
        return own
    found = {name: getattr(part, name) for name in slots if hasattr(part, name)}
    return found | getattr(part, "__dict__", {})


def _slots(kind: type) -> tuple[str, ...]:
    if kind not in _SLOTS:
        names: list[str] = []
        for each in kind.__mro__:
            slots = each.__dict__.get("__slots__", ())
            names += (slots,) if isinstance(slots, str) else slots
        _SLOTS[kind] = tuple(name for name in names if name not in ("__weakref__", "__dict__"))
    return _SLOTS[kind]


def is_frozen(kind: type) -> bool:
    """Return whether an object of this kind is what it was, as long as it is the same object."""
    if kind not in _FROZEN:
        params = getattr(kind, "__dataclass_params__", None)
        _FROZEN[kind] = issubclass(kind, BaseModel) or (params is not None and params.frozen)
    return _FROZEN[kind]


def state_of(part: Any) -> Any:
    """Return the state of a stop rule or component: its own, or all attributes that may change."""
    if isinstance(part, Stateful):
        return part.state()
    return {
        name: value for name, value in attributes(part).items() if not (is_frozen(type(value)) or is_constant(value))
    }


def load_state(part: Any, state: Any) -> None:
    """Write what `state_of` returned into a stop rule or component, in place."""
    if isinstance(part, Stateful):
        part.load_state(state)
        return
    for name, value in state.items():
        object.__setattr__(part, name, settle(getattr(part, name, None), value))


def settle(old: Any, new: Any) -> Any:
    """A value where another of its kind stood: containers and objects with attributes are changed in place.

    Returns:
        What now stands there.
    """
    kind = type(new)
    if type(old) is not kind or kind in PLAIN or is_frozen(kind) or old is new:
        return new
    if kind is list:
        old[:] = new
    elif kind is deque and old.maxlen == new.maxlen:
        old.clear()
        old.extend(new)
    elif kind is set:
        old.clear()
        old.update(new)
    elif isinstance(old, dict) and kind in (dict, OrderedDict, Counter, defaultdict):
        kept = {key: settle(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(kept)
    elif isinstance(new, torch.Tensor | tuple | frozenset) or is_constant(new) or not _is_ours(kind):
        return new
    else:
        for name, value in attributes(new).items():
            setattr(old, name, settle(getattr(old, name, None), value))
    return old


def _is_ours(kind: type) -> bool:
    """Return whether an object is nothing but its attributes."""
    return all(getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))


def twin(value: T) -> T:
    """A value that can change without this one: `settle` in the other direction.

    Containers and objects with attributes are copied, however deep they stand; constants, tensors and what is frozen
    are shared.
    """
    kind: type = type(value)
    if kind in PLAIN or is_frozen(kind) or is_constant(value):
        return value
    made: Any = value
    if kind in (list, deque, set):
        made = copy.copy(value)
        if any(type(each) not in PLAIN for each in made):
            others = [twin(each) for each in made]
            made.clear()
            (made.update if kind is set else made.extend)(others)
    elif isinstance(value, dict) and kind in (dict, OrderedDict, Counter, defaultdict):
        made = copy.copy(value)
        for key, each in value.items():
            if type(each) not in PLAIN:
                made[key] = twin(each)
    elif not isinstance(value, torch.Tensor | tuple | frozenset) and _is_ours(kind):
        made = copy.copy(value)
        for name, each in attributes(value).items():
            if type(each) not in PLAIN:
                object.__setattr__(made, name, twin(each))
    return made  # type: ignore[no-any-return]
