"""CAAD: towards the logits that the model had in the most similar contexts of truthful answers (paper #94)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, FiniteFloat
from torch import nn

from decoding.artifacts import ArtifactName
from decoding.contrast._stores import (
    CHUNK,
    EXAMPLE_ENTRIES,
    LAST,
    Datastore,
    StoreContrast,
    StoreParams,
    check_dtype,
    weights_of,
)
from decoding.parts import Example, ModelShape

LEAST_NORM = 1e-12


class LogitStore(Datastore):
    """Datastore of the model's logits in each context; keys have length 1.

    Args:
        count: entries.
        width: of the model's hidden states.
        vocab_size: of the model.
        layer: see `Datastore`.

    Attributes:
        values: float [count, vocab_size].
    """

    def __init__(self, count: int, width: int, vocab_size: int, layer: int = LAST) -> None:
        super().__init__(count, width, layer)
        self.values = nn.Parameter(torch.zeros(count, vocab_size), requires_grad=False)

    @property
    def settings(self) -> dict[str, Any]:
        """See `Head.settings`."""
        return {**super().settings, "vocab_size": self.values.shape[1]}

    def check_values(self) -> None:
        """See `Datastore.check_values`."""
        check_dtype("values", self.values, torch.float32, torch.float16, torch.bfloat16)
        if not all(part.isfinite().all() for part in torch.split(self.values, CHUNK)):
            raise ValueError("its values are not finite")

    def check_vocabulary(self, vocab_size: int) -> None:
        """See `Datastore.check_vocabulary`."""
        if self.values.shape[1] != vocab_size:
            raise ValueError(f"it has logits of {self.values.shape[1]} tokens, and the model {vocab_size}")

    def key_of(self, state: torch.Tensor) -> torch.Tensor:
        """See `Datastore.key_of`; of length 1."""
        key = super().key_of(state)
        unit: torch.Tensor = key / key.norm().clamp_min(LEAST_NORM)
        return unit

    def similar(self, key: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the most similar contexts: int64 [k], best first, and float32 [k], their cosines, at most 1."""
        found, distances = self.nearest(key, count)
        return found, 1.0 - 0.5 * distances

    def shift(self, key: torch.Tensor, neighbours: int, temperature: float, floor: float) -> torch.Tensor:
        """Return the mean logits of similar contexts, times how far the best cosine is above `floor`: float32 [vocab].

        Args:
            key: float32 [width], of length 1.
            neighbours: most entries that count.
            temperature: of their weights, softmax(cosine / temperature).
            floor: cosine of the best one up to which the result is 0.
        """
        found, cosines = self.similar(key, neighbours)
        gain = max(0.0, float(cosines[0]) - floor)
        weights = weights_of(cosines, temperature)
        return gain * (self.values[found].float() * weights[:, None]).sum(0)


class CaadParams(StoreParams):
    """Parameters."""

    example: ClassVar = {"weight": 40.0, "floor": -1.0, "neighbours": 4}

    artifact: ArtifactName = "caad"
    weight: Annotated[FiniteFloat, Field(ge=0.0, le=100.0, description="of the added logits; 0 is off")] = 1.0
    floor: Annotated[
        FiniteFloat,
        Field(ge=-1.0, le=1.0, description="cosine of the most similar context up to which nothing is added"),
    ] = 0.5
    neighbours: Annotated[int, Field(ge=1, le=1024, description="contexts whose logits are averaged")] = 8
    temperature: Annotated[FiniteFloat, Field(gt=0.0, description="of the weights of their cosines")] = 0.1


class Caad(StoreContrast[LogitStore]):
    """Paper #94: logits + weight * max(0, best cosine - floor) * mean logits of the most similar contexts.

    The mean has the weights softmax(cosine / temperature). Contexts are compared by the answering model's own hidden
    states. The paper's embedding and rule of mixing are not known to us; these are ours.
    """

    papers = (94,)
    Params = CaadParams
    params: CaadParams
    off: ClassVar = {"weight": 0.0}
    network = LogitStore

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example(kind=cls.name, head=LogitStore(EXAMPLE_ENTRIES, shape.width, shape.vocab_size))

    def look_up(self, key: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """See `StoreContrast.look_up`: logits."""
        params = self.params
        return self.store.shift(key, params.neighbours, params.temperature, params.floor)

    def mix(self, main: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """See `StoreContrast.mix`."""
        return main + self.params.weight * found


PART = Caad
