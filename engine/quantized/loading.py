"""Weights that transformers cannot read, made as they are loaded: one at a time, already in the model's dtype."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.gguf_weights import gguf_state
from engine.quantized import format_of
from engine.quantized.base import LazyWeight, QuantizedWeight, WeightFormat, empty_pages
from engine.quantized.integers import IntegerWeight
from turnout.checkpoint_files import FLOATS, weight_files


@contextmanager
def made_weights(folder: Path, dtype: torch.dtype, field: str) -> Iterator[dict[str, Any] | None]:
    """The weights of a checkpoint by name, as transformers' loader takes them; None: it reads the files by itself.

    Each is made when it is loaded, so that the memory of loading is the model's and that of making one weight.

    Args:
        folder: the checkpoint.
        dtype: of the weights from now on.
        field: the model's place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: a format, or a variant of one, that is not supported.
    """
    with ExitStack() as opened:
        if (state := gguf_state(folder, dtype, field)) is not None:
            yield state
        elif (found := format_of(folder, field)) is not None:
            files = [opened.enter_context(safe_open(file, "pt")) for file in weight_files(folder, field)]
            yield _dequantized(found, files, dtype)
        else:
            yield None


def _dequantized(found: WeightFormat, files: list[Any], dtype: torch.dtype) -> dict[str, Any]:
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
    quantized, used = found.weights(places)
    state: dict[str, Any] = {name: file.get_slice(name) for name, file in places.items() if name not in used}
    for name, part in state.items():
        if name.endswith("weight") and part.get_dtype() not in FLOATS:
            raise found.refusal(f"with {name} stored as {part.get_dtype()} without factors is not supported")
    lock = threading.Lock()
    for weight in quantized:
        read = partial(read_part, weight, places)
        shape = found.shape(shapes_of(weight, places), read)
        make = partial(_make, found, weight, read, dtype)
        state[weight.name] = LazyWeight(shape, dtype, make, lock, partial(_integers, found, weight, read))
    return state


def shapes_of(weight: QuantizedWeight, places: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a weight's stored tensors, of opened files by the tensors' names."""
    return {part: tuple(places[name].get_slice(name).get_shape()) for part, name in weight.tensors.items()}


def read_part(weight: QuantizedWeight, places: dict[str, Any], part: str) -> torch.Tensor:
    """One of a weight's stored tensors."""
    name = weight.tensors[part]
    tensor: torch.Tensor = places[name].get_tensor(name)
    return tensor


def _make(
    found: WeightFormat, weight: QuantizedWeight, read: Callable[[str], torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    dense = found.dense({part: read(part) for part in weight.tensors})
    return empty_pages(tuple(dense.shape), dtype).copy_(dense)


def _integers(
    found: WeightFormat, weight: QuantizedWeight, read: Callable[[str], torch.Tensor]
) -> IntegerWeight | None:
    return found.integers({part: read(part) for part in weight.tensors})
