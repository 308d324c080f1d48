"""The operation of differentiable reading: likelihoods of soft tokens under a model, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from decoding.operations import Operation
from decoding.sequence import Sequence
from turnout.errors import invalid


@dataclass(frozen=True, slots=True)
class SoftScores:
    """Result of a differentiable reading; tensors are float32, on the CPU.

    Attributes:
        fluency: [chains] how well the soft tokens agree with what the model expects of them, at most 0; nats.
        prediction: [chains] log-likelihood of the tokens after them, nats; 0 where there are none.
        gradient: [chains, length, vocab] of the weighted sum of both, with respect to the logits.
    """

    fluency: torch.Tensor
    prediction: torch.Tensor
    gradient: torch.Tensor

    @classmethod
    def joined(cls, parts: Items[SoftScores]) -> SoftScores:
        """The result of all chains, from those of some at a time."""
        fluency, prediction, gradient = zip(*((p.fluency, p.prediction, p.gradient) for p in parts), strict=True)
        return cls(torch.cat(fluency), torch.cat(prediction), torch.cat(gradient))


@dataclass(frozen=True, slots=True)
class SoftLikelihood(Operation[SoftScores]):
    """Read soft tokens after a sequence, and differentiate (paper #74, COLD).

    A soft token is a mixture of the rows of the embedding table. Its weights are the softmax of its logits at a
    temperature; the gradient is always that of the softmax at temperature 1 (straight-through), so that it is exact at
    temperature 1 and does not vanish below. The model reads in float32, without a cache; nothing is appended.

    With p_t the model's distribution at place t, after the sequence and the soft tokens before t:

        fluency = sum over t and v of p_t(v) log softmax(logits_t)(v)
        prediction = log p(after | sequence, soft tokens)

    Attributes:
        logits: float [chains, length, vocab].
        after: tokens behind the soft ones.
        fluency_weight: of the fluency in the gradient.
        prediction_weight: of the prediction in the gradient.
        temperature: of the mixtures that the model reads.
        top_k: p_t is cut down to that many most probable tokens and renormalised; 0: it is not.
        uncut: tokens that are never cut.

    Raises:
        ValueError: the logits are of another shape.
        TurnoutError: INVALID_ARGUMENT: the weights cannot be differentiated (endpoints, models that are split over
            processes, weights kept as integers); OUT_OF_RANGE: all tokens do not fit the context; RESOURCE_EXHAUSTED:
            there is no memory for the weights in float32.
    """

    name: ClassVar[str] = "soft_likelihood"
    fills_cache: ClassVar[bool] = False
    logits: torch.Tensor
    after: tuple[int, ...] = ()
    fluency_weight: float = 1.0
    prediction_weight: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    uncut: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.logits.dim() != 3 or 0 in self.logits.shape:
            raise ValueError(f"logits: {list(self.logits.shape)}, but [chains, length, vocabulary]")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse logits of another vocabulary.

        Raises:
            ValueError: they are.
        """
        if self.logits.shape[-1] != vocab_size:
            raise ValueError(f"logits: {self.logits.shape[-1]} columns, but the vocabulary has {vocab_size}")

    async def run(self, model: Any, seq: Sequence) -> SoftScores:
        """Refuse a model that has no handler for it."""
        raise invalid("method", f"the weights of {model.name!r} cannot be differentiated")


def mixtures(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights of soft tokens: the softmax at a temperature, with the gradient of the softmax at temperature 1."""
    soft = logits.softmax(-1)
    return soft if temperature == 1.0 else soft + ((logits / temperature).softmax(-1) - soft).detach()


def fluency(predicted: torch.Tensor, logits: torch.Tensor, top_k: int = 0, kept: tuple[int, ...] = ()) -> torch.Tensor:
    """Agreement of soft tokens with what a model expects of them: see `SoftLikelihood`.

    Args:
        predicted: [chains, length, vocab] the model's logits at their places.
        logits: [chains, length, vocab] theirs.
        top_k: see `SoftLikelihood`.
        kept: tokens that are never cut.

    Returns:
        [chains]
    """
    if 0 < top_k < predicted.shape[-1]:
        keep = torch.zeros_like(predicted, dtype=torch.bool).scatter_(-1, predicted.detach().topk(top_k).indices, True)
        keep[..., list(kept)] = True
        predicted = predicted.masked_fill(~keep, -torch.inf)
    return (predicted.softmax(-1) * logits.log_softmax(-1)).sum((-1, -2))
