"""Linear weights that are kept as integers: which, and what stands in their place until they are packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from engine.backends.native.weights import keeps
from engine.quantized.base import LazyWeight
from engine.quantized.integers import Bits, IntegerWeight, rounded
from engine.quantized.loading import made_weights
from turnout.errors import invalid

Weights = Literal["dense", "stored", "int8", "int4"]
SHOWN = 3  # layers that are not kept as integers, by name
EMBEDDING = "model.embed_tokens"  # whose weight is that of a head which is not stored


@dataclass(frozen=True, slots=True)
class Integers:
    """How a model's linear weights are kept.

    Attributes:
        weights: as `models.NAME.weights` has it, not `dense`.
        folder: of the checkpoint.
        dtype: of everything else, and of activations before they are rounded.
        field: the model's place in the configuration, for messages.
    """

    weights: Weights
    folder: Path
    dtype: torch.dtype
    field: str

    def attach(self, model: Any) -> str:
        """Give linear layers their `integers`, and as `weight` the numbers that these stand for.

        A head that is the embedding as well gets a weight of its own.

        Returns:
            What was done, for the operator.

        Raises:
            TurnoutError: INVALID_ARGUMENT: no weight can be kept so.
        """
        total = kept = count = size = 0
        others = []
        named, head = dict(_linears(model)), model.get_output_embeddings()
        found = self._stored(named, head) if self.weights == "stored" else None
        for name, linear in named.items():
            total += linear.weight.numel()
            integers = self._rounded(linear, head) if found is None else found.get(name)
            if integers is None:
                others.append(name)
                continue
            if found is None:
                linear.weight = nn.Parameter(integers.dense().to(self.dtype), requires_grad=False)
            linear.integers = integers  # type: ignore[assignment]
            count, kept, size = count + 1, kept + linear.weight.numel(), size + integers.num_bytes
        if count == 0:
            why = "no linear weight is stored as integers that the kernels hold exactly"
            message = f"{self.weights!r}: {why}; allowed for this model: dense, int8, int4"
            raise invalid(self.field, message)
        dense = kept * self.dtype.itemsize
        names = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
        kind = str(self.dtype).removeprefix("torch.")
        rest = f"; {total - kept:,} numbers of {len(others)} others as {kind} ({names})"
        return (
            f"weights {self.weights}: {count} linear layers take {size / 2**20:,.1f} MiB in place of"
            f" {dense / 2**20:,.1f}{rest if kept < total else ''}; their inputs are rounded to 8 bits"
        )

    def replace(self, model: Any) -> Any:
        """A float32 copy of the model with the numbers that the integers stand for."""
        if self.weights != "stored":
            for _, linear in _linears(model):
                dense = self._rounded(linear, model.get_output_embeddings()).dense()
                linear.weight = nn.Parameter(dense, requires_grad=False)
        return model

    def _rounded(self, linear: nn.Linear, head: Any) -> IntegerWeight:
        """A head has 8 bits: no layer comes after it that could make up for what is rounded."""
        bits: Bits = 4 if self.weights == "int4" and linear is not head else 8
        return rounded(linear.weight.to(self.dtype), bits)

    def _stored(self, named: dict[str, nn.Linear], head: Any) -> dict[str, IntegerWeight]:
        found = {}
        with made_weights(self.folder, self.dtype, self.field) as state:
            for name, linear in named.items():
                stored = (state or {}).get(f"{name}.weight")
                if stored is None and linear is head:
                    stored = (state or {}).get(f"{EMBEDDING}.weight")
                integers = stored.integers() if isinstance(stored, LazyWeight) else None
                if integers is not None and keeps(integers) and integers.codes.shape == linear.weight.shape:
                    found[name] = integers
        return found


def _linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Layers the kernels would pack: whole linear ones, of even width."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.in_features % 2 == 0:
            yield name, module
