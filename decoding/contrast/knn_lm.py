"""kNN-LM: the model's law mixed with what followed in a datastore's most similar contexts (paper #174)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, FiniteFloat

from decoding.artifacts import ArtifactName
from decoding.contrast._stores import (
    EXAMPLE_ENTRIES,
    LAST,
    Datastore,
    StoreContrast,
    StoreParams,
    check_dtype,
    weights_of,
)
from decoding.contrast.base import outside
from decoding.parts import Example, ModelShape


class TokenStore(Datastore):
    """Datastore of the token that followed each context.

    Args:
        count: entries.
        width: of the model's hidden states.
        layer: see `Datastore`.

    Attributes:
        values: int64 [count], token ids.
    """

    values: torch.Tensor

    def __init__(self, count: int, width: int, layer: int = LAST) -> None:
        super().__init__(count, width, layer)
        self.register_buffer("values", torch.zeros(count, dtype=torch.int64))
        self._range = (0, 0)

    def check_values(self) -> None:
        """See `Datastore.check_values`."""
        check_dtype("values", self.values, torch.int64)
        self._range = int(self.values.min()), int(self.values.max())

    def check_vocabulary(self, vocab_size: int) -> None:
        """See `Datastore.check_vocabulary`."""
        least, most = self._range
        if least < 0 or most >= vocab_size:
            raise ValueError(f"it has token ids outside of 0 to {vocab_size - 1}")

    def law(self, key: torch.Tensor, neighbours: int, temperature: float, vocab_size: int) -> torch.Tensor:
        """Return the law of the tokens that followed the nearest contexts: float32 [vocab_size].

        Args:
            key: float32 [width].
            neighbours: most entries that count.
            temperature: squared distances are divided by it.
            vocab_size: of the model.
        """
        found, distances = self.nearest(key, neighbours)
        return torch.zeros(vocab_size).index_add_(0, self.values[found], weights_of(-distances, temperature))


class KnnLmParams(StoreParams):
    """Parameters."""

    example: ClassVar = {"weight": 0.9, "neighbours": 4, "temperature": 0.5}

    artifact: ArtifactName = "knn_lm"
    weight: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="share of the neighbours' law; 0 is off")] = 0.25
    neighbours: Annotated[int, Field(ge=1, le=65_536, description="entries that are looked up for a token")] = 1024
    temperature: Annotated[
        FiniteFloat,
        Field(gt=0.0, description="squared distances are divided by it; what fits depends on the model's states"),
    ] = 1.0


class KnnLm(StoreContrast[TokenStore]):
    """Paper #174: log(weight * p(neighbours) + (1 - weight) * p).

    p(neighbours) gives each of the nearest entries exp(-squared distance / temperature) for the token it holds. A
    lower perplexity on texts like the datastore's is not better writing: see docs/contrast.md.
    """

    papers = (174,)
    Params = KnnLmParams
    params: KnnLmParams
    off: ClassVar = {"weight": 0.0}
    network = TokenStore

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        store = TokenStore(EXAMPLE_ENTRIES, shape.width)
        store.values.copy_(torch.arange(EXAMPLE_ENTRIES) % (shape.vocab_size - 2) + 2)
        return Example(kind=cls.name, head=store)

    def look_up(self, key: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """See `StoreContrast.look_up`: probabilities."""
        return self.store.law(key, self.params.neighbours, self.params.temperature, vocab_size)

    def mix(self, main: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """See `StoreContrast.mix`."""
        return mixed(main.log_softmax(-1), found, self.params.weight)


def mixed(main: torch.Tensor, found: torch.Tensor, weight: float) -> torch.Tensor:
    """Mix laws: log-probabilities and probabilities, float32 [rows, vocab] -> log-probabilities."""
    share = torch.tensor(weight)
    made = torch.logaddexp(main + (-share).log1p(), found.log() + share.log())
    return outside(made, made.isfinite(), main)


PART = KnnLm
