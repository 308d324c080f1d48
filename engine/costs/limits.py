"""Whether configured models fit into memory, said before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch

from engine.backends.base import NATIVE_DTYPES
from engine.backends.llama_fused import SHORTEST_TABLE
from engine.backends.weight_packing import packs
from engine.checkpoints import read_config
from engine.costs.machine import available_bytes, memory_bytes
from engine.costs.resources import ModelShape
from engine.costs.weight_sizes import weight_sizes
from engine.quantized.integers import ROUNDED_BITS
from engine.rope import context_length
from turnout.checkpoint_files import check_checkpoint
from turnout.config import EngineConfig, ModelConfig, model_path
from turnout.errors import Code, TurnoutError, invalid

CPU = "cpu"
UNPACKED_BYTES = 1.15  # of a number that is an integer but not yet packed, with scale and minimum


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of one model, bytes.

    Attributes:
        name: the model's.
        dtype: of its weights.
        weights: as they are kept.
        cache: of keys and values.
        angles: of the rotary embedding.
        loading: what making the weights takes in addition, until it is loaded.
        on_cpu: whether it is kept where it is loaded.
        kv_dtype: how keys and values are kept.
    """

    name: str
    dtype: str
    weights: int
    cache: int
    angles: int
    loading: int
    on_cpu: bool
    kv_dtype: str = "auto"

    @property
    def total(self) -> int:
        """What it takes once it is loaded."""
        return self.weights + self.cache + self.angles

    def __str__(self) -> str:
        cache = "KV cache" if self.kv_dtype == "auto" else f"KV cache in {self.kv_dtype}"
        sizes = f"{_mib(self.weights)} of weights, {_mib(self.cache)} of {cache}, {_mib(self.angles)} of rotary angles"
        return f"{self.name}: {sizes}"


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
    if slot_bytes < 1:
        raise invalid(
            f"{field}.path", "config.json: numbers of layers and heads and the width of a head must be positive"
        )
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

    They must fit into the memory of the machine or control group, with what this process has loaded already (see
    `claim`), and their loading into what is available now. What a forward needs in addition to weights and caches
    depends on the batch and is not counted.

    Args:
        models: what one process loads, by name.
        engine: block size, largest batch and kernels.
        ranks: processes that each of the models is split over: this is one of them, and all have as much.

    Returns:
        What they need of each device, bytes.

    Raises:
        TurnoutError: INVALID_ARGUMENT, with the sizes and what to change.
    """
    by_device = predict_memory(models, engine, ranks)
    for needs in by_device.values():
        for need in needs:
            limit = models[need.name].memory_limit_bytes
            if limit is not None and need.total > limit:
                raise _does_not_fit([need], limit, f"models.{need.name}.memory_limit_bytes")
    for device, needs in by_device.items():
        field = f"models.{max(needs, key=lambda need: need.total).name}"
        whole = memory_bytes(torch.device(device))
        held = sum(bytes_of.get(device, 0) for bytes_of in _claims.values())
        if sum(need.total for need in needs) > whole - held:
            raise _does_not_fit(needs, whole, field, held)
        if (peak := peak_bytes(needs)) > (left := _left(device, held)):
            raise _not_available(needs, peak, left, field)
        if device != CPU and (peak := staging_bytes(needs)) > (left := _left(CPU, 0)):
            raise _not_available(needs, peak, left, field, " of the machine, through which it is loaded,")
    return {device: sum(need.total for need in needs) for device, needs in by_device.items()}


def predict_memory(
    models: Mapping[str, ModelConfig], engine: EngineConfig, ranks: int = 1
) -> dict[str, list[MemoryNeed]]:
    """What models need that are loaded into one process, by device; arguments as of `check_memory`.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a model is not supported, or its files are not all there and whole.
    """
    by_device: dict[str, list[MemoryNeed]] = {}
    for name, settings in models.items():
        by_device.setdefault(settings.device, []).append(_need(name, settings, engine, ranks))
    return by_device


def peak_bytes(needs: Sequence[MemoryNeed]) -> int:
    """The most memory that models take on their device, while they are loaded one after the other or afterwards."""
    loading, loaded = 0, 0
    for need in needs:
        loading = max(loading, loaded + need.weights + (need.loading if need.on_cpu else 0))
        loaded += need.weights
    return max(loading, sum(need.total for need in needs))


def described_needs(needs: Sequence[MemoryNeed], device: str) -> tuple[str, str | None]:
    """A line that says what models of one process need on a device, and one if this machine does not have it now.

    Args:
        needs: of `predict_memory`.
        device: which.
    """
    peak, total = peak_bytes(needs), sum(need.total for need in needs)
    line = f"{_mib(total)} of memory on {device}, up to {_mib(peak)} while loading ({'; '.join(map(str, needs))})"
    if device != CPU and not torch.cuda.is_available():
        return line, None
    left = max(available_memory(device), 0)
    return line, f"{_mib(peak)} are needed on {device}, {_mib(left)} are available here now" if peak > left else None


def staging_bytes(needs: Sequence[MemoryNeed]) -> int:
    """Memory of the machine that loading onto another device takes: the models pass through it one by one."""
    return max(need.weights + need.loading for need in needs)


def available_memory(device: str) -> int:
    """Memory that models may take now: what is free, less what this process was promised and has not touched yet."""
    return _left(device, sum(bytes_of.get(device, 0) for bytes_of in _claims.values()))


def _left(device: str, held: int) -> int:
    untouched = max(held - psutil.Process().memory_info().rss, 0) if device == CPU else 0
    return available_bytes(torch.device(device)) - untouched


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


def _need(name: str, settings: ModelConfig, engine: EngineConfig, ranks: int) -> MemoryNeed:
    config, shape = read_shape(name, settings)
    slot_bytes = -(-shape.kv_bytes_per_token // ranks)
    size = cache_size(name, slot_bytes, context_length(config), settings, engine)
    cache = size.num_blocks * engine.block_size * slot_bytes
    on_cpu = settings.device == CPU
    dtype: torch.dtype = getattr(torch, settings.dtype)
    native = engine.kernels != "torch" and dtype in NATIVE_DTYPES
    packed = on_cpu and ranks == 1 and (native or packs(dtype))  # a share is not packed
    # Cosine and sine of every position, float32, in tables that double as sequences grow; and the frequencies.
    rows = max(1 << (size.max_length - 1).bit_length(), SHORTEST_TABLE) + 1
    angles = 2 * 4 * shape.head_dim * rows
    sizes = weight_sizes(model_path(settings), dtype, f"models.{name}.path")
    loading = sizes.loading_bytes + (sizes.cast_bytes if packed else 0)
    held = shape.held_bytes(packed, ranks)
    if settings.weights != "dense":  # numbers, and integers of a byte each, are there until all are packed
        loading += max(0, shape.weight_bytes + shape.embedding_parameters * dtype.itemsize - held)
        loading += math.ceil(sizes.num_parameters * UNPACKED_BYTES)
    return MemoryNeed(name, settings.dtype, held, cache, angles, loading, on_cpu, settings.kv_dtype)


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
    shape = replace(ModelShape.of(config, count_parameters(folder, field), itemsize), kv_dtype=settings.kv_dtype)
    if settings.weights in ROUNDED_BITS:
        shape = replace(shape, body_bits=ROUNDED_BITS[settings.weights], head_bits=ROUNDED_BITS["int8"])
    return config, shape


def count_parameters(folder: Path, field: str = "model") -> int:
    """Numbers that a checkpoint's weights have, of a wrapper those of its text side; none is read.

    Args:
        folder: the checkpoint.
        field: its place in the configuration, for messages.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`, there are none, or one is no such file.
    """
    return weight_sizes(folder, torch.float32, field).num_parameters


def _does_not_fit(needs: list[MemoryNeed], limit: int, field: str, held: int = 0) -> TurnoutError:
    claimed = f", of which this process holds {_mib(held)}" if held else ""
    message = (
        f"{field}: {_mib(sum(need.total for need in needs))} do not fit into {_mib(limit)} of memory{claimed}"
        f" ({'; '.join(map(str, needs))}); use {_less(needs)}"
    )
    return TurnoutError(Code.INVALID_ARGUMENT, message, field)


def _not_available(needs: list[MemoryNeed], peak: int, left: int, field: str, where: str = "") -> TurnoutError:
    loading = _mib(max(need.loading for need in needs))
    message = (
        f"{field}: loading takes up to {_mib(peak)}, and {_mib(max(left, 0))} of memory{where} are available now ("
        f"{'; '.join(map(str, needs))}; {loading} while weights are read); use {_less(needs)}, or end"
        " what else takes memory"
    )
    return TurnoutError(Code.INVALID_ARGUMENT, message, field)


def _less(needs: list[MemoryNeed]) -> str:
    smaller = ", dtype bfloat16" if any(need.dtype == "float32" for need in needs) else ""
    return f"less kv_memory_bytes{smaller} or a smaller model"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
