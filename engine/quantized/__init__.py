"""Quantized checkpoints. A format is one file: the names of its stored tensors, and the weight that they make."""

from __future__ import annotations

from pathlib import Path

from engine.quantized.awq import Awq
from engine.quantized.base import WeightFormat
from engine.quantized.compressed_tensors import CompressedTensors
from engine.quantized.fp8 import Fp8
from engine.quantized.gptq import Gptq
from turnout.checkpoint_files import not_supported, quantization
from turnout.errors import invalid

__all__ = ["FORMATS", "format_of"]

FORMATS: dict[str, type[WeightFormat]] = {each.method: each for each in (Gptq, Awq, CompressedTensors, Fp8)}


def format_of(folder: Path, field: str = "model") -> WeightFormat | None:
    """The format of a checkpoint; None: its weights are not quantized.

    Raises:
        TurnoutError: INVALID_ARGUMENT for `field`: a method, or a variant of one, that is not supported.
    """
    found = quantization(folder, field)
    if found is None:
        return None
    if found.method not in FORMATS:
        raise invalid(field, f"{folder}: {not_supported(found.place, found.method)}")
    try:
        return FORMATS[found.method](found.settings, f"{folder}: {found.place}", field)
    except (AttributeError, TypeError, ValueError) as error:
        message = f"{folder}: {found.place}: settings of {found.method} that cannot be used: {error}"
        raise invalid(field, message) from None
