"""Formats of quantized checkpoints: which stored tensors make one weight, and how.

A format knows nothing of when a weight is made: `engine.quantized.loading` makes each as it is loaded, and a backend
that keeps weights packed may read the same tensors instead.
"""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from engine.quantized.integers import IntegerWeight
from turnout.errors import TurnoutError, invalid

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The stored tensors of one weight.

    Attributes:
        name: of the weight in the model, such as `model.layers.0.mlp.up_proj.weight`.
        tensors: names of the stored tensors by what they are, such as `qweight` or `scales`.
    """

    name: str
    tensors: Mapping[str, str]


class WeightFormat(ABC):
    """A format of one checkpoint, with its settings.

    Attributes:
        method: `quant_method` of the configuration.
        main: what is stored in place of a weight, as the end of its name; a weight has one of them.
        parts: what may be stored in addition.
        dropped: stored tensors that are for quantized activations, or tell nothing more.
        notes: for the person who runs the model.
    """

    method: ClassVar[str]
    main: ClassVar[tuple[str, ...]]
    parts: ClassVar[tuple[str, ...]]
    dropped: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: Mapping[str, Any], place: str, field: str) -> None:
        """Check the settings.

        Args:
            settings: what the checkpoint says of its quantization.
            place: file or field that says so, for messages.
            field: the model's place in the configuration, for messages.

        Raises:
            TurnoutError: INVALID_ARGUMENT for `field`: a variant that is not supported.
        """
        self.settings, self.place, self.field = settings, place, field
        self.notes: list[str] = []
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Refuse settings that are not supported, and note what is not done."""

    @abstractmethod
    def shape(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> Shape:
        """The shape of a weight, [out, in].

        Args:
            shapes: of its stored tensors.
            read: gives one of them, where a tensor holds the shape.
        """

    @abstractmethod
    def dense(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A weight, float32 [out, in], from its stored tensors."""

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> IntegerWeight | None:
        """The same weight as it is stored; None where it is not of integers that stand for exactly these numbers."""
        return None

    def weights(self, names: Iterable[str]) -> tuple[list[QuantizedWeight], set[str]]:
        """Find the quantized weights among stored tensors.

        Args:
            names: of all stored tensors.

        Returns:
            The weights, and the names that are no weight of the model: parts of these, and `dropped`.
        """
        names = set(names)
        found = []
        used = {name for name in names if name.endswith(self.dropped)} if self.dropped else set()
        for name in sorted(names):
            stem, _, main = name.rpartition(".")
            if main not in self.main:
                continue
            stored = {part: f"{stem}.{part}" for part in self.parts if f"{stem}.{part}" in names}
            if self.is_quantized(stored):
                found.append(QuantizedWeight(f"{stem}.weight", {main: name, **stored}))
                used |= {name, *stored.values()}
        return found, used

    def is_quantized(self, parts: Mapping[str, str]) -> bool:
        """Whether a tensor with these parts is a quantized weight; a format's own names always are."""
        return True

    def refusal(self, message: str) -> TurnoutError:
        """An error that names the model's field and the method."""
        return invalid(self.field, f"{self.place}: {self.method} {message}")


class LazyWeight:
    """A tensor that is made each time it is asked for; what transformers loads like a slice of a safetensors file.

    Args:
        shape: of the tensor.
        dtype: of it.
        make: makes it.
        lock: shared by all of a model, so that one at a time takes the memory of making it.
        integers: the weight as it is stored, where it is stored as integers.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        make: Callable[[], torch.Tensor],
        lock: threading.Lock,
        integers: Callable[[], IntegerWeight | None] = lambda: None,
    ) -> None:
        self.shape, self.dtype, self.integers = shape, dtype, integers
        self._make, self._lock = make, lock

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self._lock:
            whole = self._make()
            part = whole[index]
            return part if part.numel() == whole.numel() else part.clone()  # a view would keep the whole alive


def empty_pages(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in pages of its own, which the system has back as soon as it is freed.

    What the C library allocates for loading threads it keeps: once weights are packed, their memory would be lost.
    """
    pages = mmap.mmap(-1, max(prod(shape), 1) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype)[: prod(shape)].view(shape)


def unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unsigned integers of `bits` bits out of int32 words, lowest bits first.

    Args:
        words: int32 [rows, columns].
        bits: 2, 4 or 8.
        dim: along which the integers are packed; it grows by 32 / `bits`.

    Returns:
        uint8 [rows, columns], one of them longer.
    """
    each = 32 // bits
    found = torch.empty((*words.shape, each), dtype=torch.uint8)
    for place in range(each):  # one at a time, since a shifted word takes four bytes
        found[..., place] = words >> place * bits & (1 << bits) - 1
    return found.flatten(1) if dim == 1 else found.movedim(-1, 1).reshape(-1, words.shape[1])


def spread(values: torch.Tensor, shape: Shape, blocks: Iterable[Sequence[int]] = ()) -> torch.Tensor:
    """Values of blocks, for every number of a matrix; what broadcasts is left as small as it is.

    Args:
        values: one for all (of any dimensions), one for each row ([rows] or [rows, 1]), or [blocks of rows, blocks of
            columns].
        shape: of the matrix.
        blocks: sizes that a block may have, of which the last ones may be cut off; otherwise it divides the matrix.

    Returns:
        What broadcasts to the matrix.

    Raises:
        ValueError: there are as many values as no blocks have.
    """
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.ndim == 1:
        values = values.reshape(-1, 1)
    for dim, (size, count) in enumerate(zip(shape, values.shape, strict=True)):
        if count not in (1, size):
            fitting = (block[dim] for block in blocks if -(-size // block[dim]) == count)
            each = next(fitting, size // count)
            if -(-size // each) != count:
                raise ValueError(f"{list(values.shape)} factors do not fit a weight of {list(shape)}")
            values = values.repeat_interleave(each, dim).narrow(dim, 0, size)
    return values
