"""Whether configured models fit into memory, said before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from weakref import WeakKeyDictionary

import torch

from engine.backends.base import NATIVE_DTYPES
from engine.backends.llama_fused import SHORTEST_TABLE
from engine.backends.weight_packing import packs
from engine.checkpoints import read_config
from engine.costs.machine import memory_bytes
from engine.costs.resources import ModelShape
from engine.rope import context_length
from engine.text_side import OF_TEXT, is_wrapper
from turnout.checkpoint_files import check_checkpoint, read_config_file, tensors_of, weight_files
from turnout.config import EngineConfig, ModelConfig, model_path
from turnout.errors import Code, TurnoutError, invalid

ALL = re.compile("")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The block pool of one model.

    Attributes:
        num_blocks: blocks of `engine.block_size` tokens.
        max_length: longest sequence, tokens.
        bytes_needed: KV memory for one sequence of the length asked for.
    """

    num_blocks: int
    max_length: int
    bytes_needed: int


def cache_size(name: str, slot_bytes: int, positions: int, settings: ModelConfig, engine: EngineConfig) -> CacheSize:
    """How many blocks a model gets, and the longest sequence they can hold.

    Args:
        name: the model's, for messages.
        slot_bytes: KV memory of one token.
        positions: tokens the checkpoint's positions allow.
        settings: the model's configuration.
        engine: block size and largest batch.

    Raises:
        TurnoutError: INVALID_ARGUMENT, a `max_length` was configured that the checkpoint or the KV memory does not
            allow. One that was not is cut to what fits.
    """
    field = f"models.{name}"
    wanted = settings.max_length or positions
    if wanted > positions:
        raise invalid(f"{field}.max_length", f"{wanted} is beyond the checkpoint's {positions} positions")
    block_bytes = slot_bytes * engine.block_size
    needed = -(-wanted // engine.block_size)
    num_blocks = settings.kv_memory_bytes // block_bytes
    if num_blocks < needed and (settings.max_length is not None or num_blocks < 1):
        length = wanted if settings.max_length is not None else engine.block_size
        minimum = -(-length // engine.block_size) * block_bytes
        message = (
            f"{settings.kv_memory_bytes} bytes hold {num_blocks * engine.block_size} tokens; one sequence of {length}"
            f" tokens needs at least {minimum}"
        )
        raise invalid(f"{field}.kv_memory_bytes", message)
    # No pool needs more than a full batch of the longest sequences.
    num_blocks = min(num_blocks, engine.max_batch * needed)
    return CacheSize(num_blocks, min(wanted, num_blocks * engine.block_size), needed * block_bytes)


def check_memory(models: Mapping[str, ModelConfig], engine: EngineConfig, ranks: int = 1) -> dict[str, int]:
    """Refuse models whose weights and caches do not fit into memory together, from their files' headers.

    What this process has loaded already counts, see `claim`; what other processes hold is not seen. What a forward
    needs in addition to weights and caches depends on the batch and is not counted.

    Args:
        models: what one process loads, by name.
        engine: block size, largest batch and kernels.
        ranks: processes that each of the models is split over: this is one of them, and all have as much.

    Returns:
        What they need of each device, bytes.

    Raises:
        TurnoutError: INVALID_ARGUMENT, with the sizes and what to change.
    """
    by_device: dict[str, list[_Need]] = {}
    for name, settings in models.items():
        need = _need(name, settings, engine, ranks)
        limit = settings.memory_limit_bytes
        if limit is not None and need.total > limit:
            raise _does_not_fit([need], limit, f"models.{name}.memory_limit_bytes")
        by_device.setdefault(settings.device, []).append(need)
    for device, needs in by_device.items():
        available = memory_bytes(torch.device(device))
        held = sum(bytes_of.get(device, 0) for bytes_of in _claims.values())
        if sum(need.total for need in needs) > available - held:
            largest = max(needs, key=lambda need: need.total)
            raise _does_not_fit(needs, available, f"models.{largest.name}", held)
    return {device: sum(need.total for need in needs) for device, needs in by_device.items()}


# What this process holds by device, bytes, as long as its owner lives and has not given it up.
_claims: WeakKeyDictionary[object, Mapping[str, int]] = WeakKeyDictionary()


def claim(owner: object, needs: Mapping[str, int]) -> None:
    """Let what was loaded count when more is checked, until `give_up` or the owner's end.

    Args:
        owner: has loaded it.
        needs: of `check_memory`.
    """
    _claims[owner] = needs


def give_up(owner: object) -> None:
    """Its memory is free again."""
    _claims.pop(owner, None)


@dataclass(frozen=True, slots=True)
class _Need:
    """Memory of one model, bytes."""

    name: str
    dtype: str
    weights: int
    cache: int
    angles: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.angles


def _need(name: str, settings: ModelConfig, engine: EngineConfig, ranks: int) -> _Need:
    config, shape = read_shape(name, settings)
    slot_bytes = -(-shape.kv_bytes_per_token // ranks)
    size = cache_size(name, slot_bytes, context_length(config), settings, engine)
    cache = size.num_blocks * engine.block_size * slot_bytes
    dtype = getattr(torch, settings.dtype)
    native = engine.kernels != "torch" and dtype in NATIVE_DTYPES
    packed = settings.device == "cpu" and (native or packs(dtype))
    # Cosine and sine of every position, float32, in tables that double as sequences grow; and the frequencies.
    rows = max(1 << (size.max_length - 1).bit_length(), SHORTEST_TABLE) + 1
    angles = 2 * 4 * shape.head_dim * rows
    return _Need(name, settings.dtype, shape.held_bytes(packed, ranks), cache, angles)


def read_shape(name: str, settings: ModelConfig) -> tuple[Any, ModelShape]:
    """The Hugging Face configuration of a configured model, and its shape, without loading it.

    Raises:
        TurnoutError: INVALID_ARGUMENT, the model is not supported or its files are not all there and whole.
    """
    field = f"models.{name}.path"
    folder = model_path(settings, field)
    check_checkpoint(folder, field)
    config = read_config(folder, field)
    itemsize: int = getattr(torch, settings.dtype).itemsize
    counted = OF_TEXT if is_wrapper(read_config_file(folder, field)) else ALL
    return config, ModelShape.of(config, count_parameters(folder, field, counted), itemsize)


def count_parameters(folder: Path, field: str = "model", counted: re.Pattern[str] = ALL) -> int:
    """Numbers stored in a checkpoint's weight files, of which the numbers are not read.

    Args:
        folder: the checkpoint.
        field: its place in the configuration, for messages.
        counted: what the names of tensors that count begin with.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, there are none, or one is no such file.
    """
    files = weight_files(folder, field)
    return sum((_count if file.suffix == ".safetensors" else _count_pickled)(file, field, counted) for file in files)


def _count_pickled(file: Path, field: str, counted: re.Pattern[str]) -> int:
    """Of a file that torch has written; weights that share their memory count once."""
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, UnpicklingError):
        message = f"{file} is not a whole weight file of torch 1.6 or later; save the model as safetensors"
        raise invalid(field, message) from None
    named = [weight for name, weight in weights.items() if counted.match(name)]
    tensors = [weight for weight in named if isinstance(weight, torch.Tensor)]
    return sum({(each.data_ptr(), each.numel()): each.numel() for each in tensors}.values())


def _count(file: Path, field: str, counted: re.Pattern[str]) -> int:
    return sum(prod(shape) for name, _, shape in tensors_of(file, field) if counted.match(name))


def _does_not_fit(needs: list[_Need], limit: int, field: str, held: int = 0) -> TurnoutError:
    parts = [
        f"{need.name}: {_mib(need.weights)} of weights, {_mib(need.cache)} of KV cache, {_mib(need.angles)} of"
        " rotary angles"
        for need in needs
    ]
    smaller = ", dtype bfloat16" if any(need.dtype == "float32" for need in needs) else ""
    claimed = f", of which this process holds {_mib(held)}" if held else ""
    message = (
        f"{field}: {_mib(sum(need.total for need in needs))} do not fit into {_mib(limit)} of memory{claimed}"
        f" ({'; '.join(parts)}); use less kv_memory_bytes{smaller} or a smaller model"
    )
    return TurnoutError(Code.INVALID_ARGUMENT, message, field)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
