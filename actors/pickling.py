"""Values between a coordinator and its actors as bytes, with tensors by reference where they should not travel.

An actor keeps large tensors of its results on its store, and the coordinator gets handles for them (`dumps` there,
`loads` here). A call that uses such a result brings the handles as references (`dumps_call`), and the actor that
answers it puts tensors in their place (`loads` with tensors). Small tensors travel inline, as contiguous CPU tensors.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from actors.tensor_store import Key, TensorStore
from decoding.operations import LEAST_BYTES
from turnout.errors import Interrupted


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class TensorHandle:
    """Stands on the coordinator for a tensor that lies on an actor's store; the store drops it when this is garbage.

    It goes to actors through `dumps_call` only, and copies are the handle itself.

    Attributes:
        owner: number of the actor that has it.
        life: which life of that actor.
        id: its number on the store.
        shape: of the tensor.
        dtype: of the tensor.
    """

    owner: int
    life: int
    id: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> Key:
        """What names the tensor."""
        return Key(self.owner, self.life, self.id)

    @property
    def nbytes(self) -> int:
        """Its size, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __copy__(self) -> TensorHandle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorHandle:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TensorHandle is pickled by dumps_call only")


class Handles:
    """The handles a coordinator holds: collects what its actors may drop.

    Handles may be collected as garbage by any thread; everything else is called from one event loop.

    Args:
        notify: called, by whichever thread it is, when something can be dropped and nothing could before.
    """

    def __init__(self, notify: Callable[[], None] | None = None) -> None:
        self._notify = notify
        self._notified = False
        self._fallen: deque[Key] = deque()
        self._dropped: dict[tuple[int, int], list[int]] = {}

    def hold(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> TensorHandle:
        """A new handle; when it is garbage its tensor can be dropped."""
        handle = TensorHandle(*key, shape, dtype)
        weakref.finalize(handle, self._fall, key).atexit = False
        return handle

    def _fall(self, key: Key) -> None:
        self._fallen.append(key)
        if not self._notified and self._notify is not None:
            self._notified = True
            self._notify()

    def _sort(self) -> None:
        self._notified = False  # before the look: what falls from now on notifies again
        while self._fallen:
            key = self._fallen.popleft()
            self._dropped.setdefault((key.owner, key.life), []).append(key.id)

    def take_dropped(self, owner: int, life: int) -> list[int]:
        """Return ids on this life's store without a handle, each once; those of earlier lives are forgotten."""
        self._sort()
        ids = self._dropped.pop((owner, life), [])
        for other in [each for each in self._dropped if each[0] == owner and each[1] < life]:
            del self._dropped[other]
        return ids


AT = (__name__, "_at")
_FOUND: dict[tuple[str, str], Any] = {}  # found before: looking it up costs more than all else


def dumps(value: Any, store: TensorStore | None, least_bytes: int = LEAST_BYTES) -> bytes:
    """Pickle what an actor gives to its coordinator.

    Args:
        value: anything picklable; a tensor in it is kept or sent once however often it stands there.
        store: where tensors of at least `least_bytes` stay; None: all travel inline.
        least_bytes: of tensors that stay.
    """

    def kept(tensor: torch.Tensor) -> Any:
        if store is None or tensor.nbytes < least_bytes:
            return _inline(tensor)
        return _at, (*store.key(store.put(tensor)), tuple(tensor.shape), _name(tensor.dtype))

    return _pickled(value, {torch.Tensor: kept})


def dumps_call(value: Any) -> tuple[bytes, list[TensorHandle]]:
    """Pickle what a coordinator gives to an actor.

    Args:
        value: anything picklable, handles included.

    Returns:
        The bytes, and the handles that stand in it, each once: `loads` needs their tensors.
    """
    handles: list[TensorHandle] = []

    def referred(handle: TensorHandle) -> Any:
        handles.append(handle)
        return _at, (*handle.key, handle.shape, _name(handle.dtype))

    return _pickled(value, {torch.Tensor: _inline, TensorHandle: referred}), handles


def loads(blob: bytes, tensors: Mapping[Key, torch.Tensor] | Handles) -> Any:
    """The value again.

    Args:
        blob: from `dumps` or `dumps_call`.
        tensors: on an actor, the tensors that references stand for; on the coordinator, where handles are counted.

    Raises:
        Interrupted: a reference to a tensor that is not in `tensors`, or of another shape or dtype than it says.
    """
    return _Unpickler(blob, tensors).load()


def _pickled(value: Any, reducers: dict[type, Callable[[Any], Any]]) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    # By exact type: a method of the pickler would be asked about every object.
    pickler.dispatch_table = {**copyreg.dispatch_table, **reducers}
    pickler.dump(value)
    return buffer.getvalue()


class _Unpickler(pickle.Unpickler):
    """Reader that puts a tensor or a handle in the place of each `_at`."""

    def __init__(self, blob: bytes, tensors: Mapping[Key, torch.Tensor] | Handles) -> None:
        super().__init__(io.BytesIO(blob))
        # No method of this object: what it has read refers to this, and would live on in a cycle with it.
        self._resolve: Callable[..., TensorHandle | torch.Tensor]
        if isinstance(tensors, Handles):
            self._resolve = partial(_held, tensors)
        else:
            self._resolve = partial(_found, tensors)

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key == AT:
            return self._resolve
        if key not in _FOUND:
            _FOUND[key] = super().find_class(module, name)
        return _FOUND[key]


def _held(handles: Handles, owner: int, life: int, number: int, shape: tuple[int, ...], dtype: str) -> TensorHandle:
    return handles.hold(Key(owner, life, number), shape, _dtype(dtype))


def _found(
    tensors: Mapping[Key, torch.Tensor], owner: int, life: int, number: int, shape: tuple[int, ...], dtype: str
) -> torch.Tensor:
    tensor = tensors.get(Key(owner, life, number))
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != _dtype(dtype):
        raise Interrupted(f"tensor {number} of life {life} of actor {owner} did not come; the call must be made again")
    return tensor


def _at(owner: int, life: int, number: int, shape: tuple[int, ...], dtype: str) -> NoReturn:
    """Stands in the bytes for a tensor on a store; `_Unpickler` never calls it."""
    raise TypeError("bytes with references to tensors are read by actors.pickling.loads only")


def _inline(tensor: torch.Tensor) -> Any:
    """How a tensor's values travel: dense tensors as bytes, all others as torch does it."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.requires_grad:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    shape, dtype = tuple(tensor.shape), _name(tensor.dtype)
    if tensor.numel() == 0:
        return _from_bytes, (b"", shape, dtype)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    buffer: Any = flat.numpy()
    return _from_bytes, (pickle.PickleBuffer(buffer), shape, dtype)


def _from_bytes(buffer: bytearray | bytes, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    if not len(buffer):
        return torch.empty(shape, dtype=_dtype(dtype))
    return torch.frombuffer(buffer, dtype=_dtype(dtype)).view(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
