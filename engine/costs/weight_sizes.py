"""Sizes of a model's weights, whatever they are stored as, from the headers of its files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open

from engine.gguf_weights import gguf_sizes
from engine.quantized import format_of
from engine.quantized.base import WeightFormat
from engine.quantized.loading import read_part, shapes_of
from engine.text_side import OF_TEXT, is_wrapper
from turnout.checkpoint_files import read_config_file, tensors_of, weight_files
from turnout.errors import invalid
from turnout.gguf_files import index_of

LOADERS = 4  # tensors that transformers reads at once
MAKING_BYTES = 10  # what a number takes at most while its weight is made: measured 9 for GPTQ, less for the others
# Types of safetensors files, and the bytes of a number.
STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
ALL = re.compile("")
EXPERTS = re.compile(r"(.+)\.(?:experts\.|ffn_\w+_exps\.)")  # of a layer, in Hugging Face's and GGUF's names
Stored = tuple[int, str]  # numbers of a tensor, and their type
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Sizes of a model's weights, from the headers of its files.

    Attributes:
        num_parameters: numbers, once they are plain ones.
        loading_bytes: memory that loading takes in addition to them at most.
        cast_bytes: of them, what is cast: its memory stays taken until all is loaded, even if it is packed anew.
    """

    num_parameters: int
    loading_bytes: int
    cast_bytes: int = 0


def weight_sizes(folder: Path, dtype: torch.dtype, field: str = "model") -> WeightSizes:
    """Sizes of the weights that loading a checkpoint makes, of a wrapper those of its text side; no weight is read.

    Args:
        folder: the checkpoint.
        dtype: of the weights once they are loaded.
        field: the model's place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: a file is none of its kind, or not whole; a format is not supported.
    """
    if (tensors := index_of(folder)) is not None:
        count, loading = gguf_sizes(tensors, read_config_file(folder, field)["model_type"])
        experts = _merged({name: prod(each.shape) for name, each in tensors.items()}, dtype)
        return WeightSizes(count, loading + experts)
    files = weight_files(folder, field)
    stored = {name: found for file in files for name, found in _stored(file, field)}
    counted = OF_TEXT if is_wrapper(read_config_file(folder, field)) else ALL
    stored = {name: found for name, found in stored.items() if counted.match(name)}
    if (quantized := format_of(folder, field)) is not None:
        with ExitStack() as opened:
            readers = [opened.enter_context(safe_open(file, "pt")) for file in files]
            return _dequantized_sizes(quantized, readers, stored, counted, dtype)
    cast = [(count, kind) for count, kind in stored.values() if kind != KINDS[dtype]]
    most = sorted(count * STORED_BYTES.get(kind, 4) for count, kind in cast)[-LOADERS:]
    kept = sum(count for count, _ in cast) * dtype.itemsize
    counts = {name: count for name, (count, _) in stored.items()}
    return WeightSizes(sum(counts.values()), sum(most) + _merged(counts, dtype), kept)


def _dequantized_sizes(
    found: WeightFormat, files: list[Any], stored: dict[str, Stored], counted: re.Pattern[str], dtype: torch.dtype
) -> WeightSizes:
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
    quantized, used = found.weights(places)
    plain = [count for name, (count, _) in stored.items() if name not in used]
    made = {
        each.name: prod(found.shape(shapes_of(each, places), partial(read_part, each, places)))
        for each in quantized
        if counted.match(each.name)
    }
    making = MAKING_BYTES * max(made.values(), default=0)
    return WeightSizes(sum(plain) + sum(made.values()), making + _merged(made, dtype))


def _merged(counts: dict[str, int], dtype: torch.dtype) -> int:
    """Bytes of the experts of one layer, which transformers copies into one tensor."""
    layers: Counter[str] = Counter()
    for name, count in counts.items():
        if found := EXPERTS.match(name):
            layers[found[1]] += count
    return max(layers.values(), default=0) * dtype.itemsize


def _stored(file: Path, field: str) -> Iterator[tuple[str, Stored]]:
    """The tensors of a file; of one that torch has written, those that share their memory once."""
    if file.suffix == ".safetensors":
        yield from ((name, (prod(shape), kind)) for name, kind, shape in tensors_of(file, field))
        return
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, UnpicklingError):
        message = f"{file} is not a whole weight file of torch 1.6 or later; save the model as safetensors"
        raise invalid(field, message) from None
    tensors = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    once = {(each.data_ptr(), each.numel()): name for name, each in reversed(tensors.items())}
    yield from ((name, (tensors[name].numel(), KINDS.get(tensors[name].dtype, ""))) for name in once.values())
