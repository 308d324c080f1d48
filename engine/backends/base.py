"""How a device computes layers and attention: chosen once, at load."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol

import torch

from engine.architectures.base import ModelParts
from engine.attention.grouped import GroupedStep
from engine.attention.layout import Layout
from engine.attention.prefixes import find_prefixes
from engine.attention.sdpa import SdpaStep
from engine.attention.step import AttentionStep
from engine.backends.llama_fused import FusedLlamaStack
from engine.backends.native.attention import NativeStep
from engine.backends.native.library import NativeUnavailableError, library
from engine.backends.native.stack import NativeStack, fits_native
from engine.backends.native.weights import native_linear
from engine.backends.stacks import LayerStack, ModuleStack
from engine.backends.weight_packing import pack_linears, packed
from engine.cache.kv_formats import KVDtype
from engine.cache.paged_kv import PagedKV
from turnout.errors import Code, TurnoutError

log = logging.getLogger(__name__)

# Keys that a prefix must have, and reads it must spare, for torch operations over it to pay.
GROUPED_PAYS = (512, 2048)

NATIVE_DTYPES = (torch.bfloat16, torch.float32)

Kernels = Literal["auto", "native", "torch", "plain"]


class Backend(Protocol):
    """One way to compute; stateless, shared by models.

    Attributes:
        name: what the configuration calls it.
        keeps_trees: whether attention can see nodes of a draft tree that were fed in an earlier forward.
        kv_dtypes: as which its attention reads and writes keys and values.
    """

    name: str
    keeps_trees: bool
    kv_dtypes: tuple[KVDtype, ...]

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        """What runs this model's layers; may take their weights over."""
        ...

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """One forward's attention."""
        ...


class PlainBackend:
    """The model's own modules and torch's attention: the slowest, and what the others are compared with."""

    name = "plain"
    keeps_trees = True
    kv_dtypes: tuple[KVDtype, ...] = ("auto", "int8")

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        """See `Backend.stack`."""
        return ModuleStack(parts)

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """See `Backend.step`."""
        return SdpaStep(layout, store)


class TorchBackend(PlainBackend):
    """Torch operations, fewer and larger than the modules' own where the architecture allows. Runs everywhere.

    Args:
        shared_attention: read prefixes that sequences of a batch have in common once for all of them.
    """

    name = "torch"

    def __init__(self, shared_attention: bool = True) -> None:
        self._shared_attention = shared_attention

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        """See `Backend.stack`."""
        if parts.fused:
            return FusedLlamaStack(parts, dtype)
        for layer in parts.layers:
            pack_linears(layer)
        parts.head = packed(parts.head)
        return ModuleStack(parts)

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """See `Backend.step`."""
        prefixes = find_prefixes(layout, *GROUPED_PAYS) if self._shared_attention else None
        return SdpaStep(layout, store) if prefixes is None else GroupedStep(layout, store, prefixes)


class NativeBackend:
    """Compiled kernels on the CPU: whole stacks of the Llama family in one call, linears and attention elsewhere.

    Args:
        shared_attention: read prefixes that sequences of a batch have in common once for all of them.
    """

    name = "native"
    keeps_trees = True
    kv_dtypes: tuple[KVDtype, ...] = ("auto", "int8")

    def __init__(self, shared_attention: bool = True) -> None:
        self._shared_attention = shared_attention

    def stack(self, parts: ModelParts, dtype: torch.dtype) -> LayerStack:
        """See `Backend.stack`."""
        if fits_native(parts):
            return NativeStack(parts, dtype)
        for layer in parts.layers:
            pack_linears(layer, native_linear)
        parts.head = native_linear(parts.head)
        return ModuleStack(parts)

    def step(self, layout: Layout, store: PagedKV) -> AttentionStep:
        """See `Backend.step`."""
        return NativeStep(layout, store, find_prefixes(layout) if self._shared_attention else None)


def choose_backend(
    kernels: Kernels,
    device: torch.device,
    shared_attention: bool = True,
    notes: list[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Backend:
    """The backend a configuration asks for.

    Args:
        kernels: "auto" takes the compiled kernels where they can be had, and says so where not.
        device: where the model lives.
        shared_attention: read prefixes that sequences of a batch share once (not on CUDA with Triton).
        notes: list that findings for the operator are appended to.
        dtype: of the model's weights.

    Raises:
        TurnoutError: FAILED_PRECONDITION, "native" was demanded and cannot be had.
    """
    if kernels == "plain":
        return PlainBackend()
    if kernels == "native" or (kernels == "auto" and device.type == "cpu"):
        reason = _why_not_native(device, dtype)
        if reason is None:
            return NativeBackend(shared_attention)
        if kernels == "native":
            message = f"the compiled kernels cannot be used: {reason}; set engine.kernels to auto or torch"
            raise TurnoutError(Code.INVALID_ARGUMENT, message, "engine.kernels")
        _note(f"without the compiled CPU kernels: {reason}", notes)
    if kernels == "auto" and device.type == "cuda":
        if find_spec("triton") is not None:
            from engine.backends.cuda.backend import CudaBackend

            if shared_attention:
                _note("the CUDA kernels read a shared prefix once for each sequence (engine.shared_attention)", notes)
            return CudaBackend(device)
        _note("without the CUDA kernels: Triton is not installed", notes)
    return TorchBackend(shared_attention)


def _why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"they are for the CPU, the model is on {device.type}"
    if dtype not in NATIVE_DTYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}, but in bfloat16 and float32"
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    return None


def _note(reason: str, notes: list[str] | None) -> None:
    note = f"decoding will be slower than it could be, {reason}"
    _say_once(note)
    if notes is not None:
        notes.append(note)


@cache
def _say_once(note: str) -> None:
    log.warning("%s", note)
