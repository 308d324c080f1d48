"""Which fields of operations have a codec of their own: the annotation chooses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import decoding.operations
import engine.kv_operations
from actors.packing import _BYTES, _CODECS, _NUMBERS, _layout
from decoding.model import Readout
from decoding.operations import Operation

# Tensors, and what bears them.
PICKLED = {("PartialForward", "sketch"), ("Read", "states"), ("Choose", "logits"), ("ImportKV", "kv")}
# Packed as places among the components that the call carries.
CARRIED = {("Propose", "drafter"), ("Propose", "length"), ("Verify", "verifier"), ("Observe", "drafter")}


def operations() -> Iterator[Any]:
    for module in (decoding.operations, engine.kv_operations):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Operation) and kind is not Operation:
                yield kind


def test_only_tensors_and_components_have_no_codec() -> None:
    """A type that is renamed falls back to pickled bytes without an error."""
    without = {(kind.__name__, name) for kind in operations() for name, codec, _ in _layout(kind) if codec is _BYTES}
    assert without == PICKLED | CARRIED


def test_every_codec_is_used() -> None:
    assert set(_CODECS) <= {str(field.type) for kind in operations() for field in fields(kind)}


def test_every_number_of_a_readout_travels() -> None:
    tensors = {"probs", "logits", "hidden", "before", "mean"}
    assert {"token", *_NUMBERS} == {field.name for field in fields(Readout)} - tensors
