"""SNNE: soft nearest neighbours among sampled answers, by pairwise similarity, without clusters (paper #85)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, FiniteFloat

from decoding.aggregators._embeddings import embeddings
from decoding.aggregators.base import AnswerSet, Candidate
from decoding.similarity import TextSimilarity, similarities
from decoding.uncertainty.base import SampledParams, SampledUncertainty


class SnneParams(SampledParams):
    """Parameters of `snne`."""

    similarity: Annotated[
        Literal["rouge_l", "token_f1", "chrf", "exact", "embedding"],
        Field(
            description="of two answers: of word order, of words, of character n-grams, equality, or the cosine of the"
            " model's own embeddings"
        ),
    ] = "rouge_l"
    tau: Annotated[FiniteFloat, Field(ge=1e-2, le=1e3, description="temperature of the soft nearest neighbours")] = 1.0
    weighted: Annotated[
        bool, Field(description="whether answers count by their mean log-probability; otherwise all the same")
    ] = False


class Snne(SampledUncertainty):
    """Paper #85 (SNNE): -sum_i w_i log sum_j exp(f(a_i, a_j) / tau), each answer its own neighbour too.

    The value is in nats: -1 / tau - ln n where n answers are all alike, greater the less they are. The weights w_i
    are 1 / n, or the answers' length-normalised probabilities, normalised over the samples.
    """

    Params = SnneParams
    params: SnneParams
    papers = (85,)
    unit = "nats"
    meaning = "how far sampled answers are from each other; the least: all are alike"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """See `Uncertainty.bounds`: all alike, and all as unlike as they can be."""
        tau, others = self.params.tau, self.params.samples - 1
        least = -1.0 if self.params.similarity == "embedding" else 0.0
        return -1.0 / tau - math.log(others + 1), -1.0 / tau - math.log1p(others * math.exp((least - 1.0) / tau))

    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        """See `Uncertainty.measure`."""
        logprobs = group.likelihoods if self.params.weighted else None
        return neighbour_entropy(await self._similarities(group), self.params.tau, logprobs)

    async def _similarities(self, group: AnswerSet) -> torch.Tensor:
        if self.params.similarity == "embedding":
            seq, model, _ = group.context
            vectors = await embeddings(model, seq, [each.ids for each in group.answers])
            return vectors @ vectors.T
        kind: TextSimilarity = self.params.similarity
        texts = [each.text for each in group.answers]
        return torch.tensor(await similarities(texts, texts, kind))


def neighbour_entropy(similarities: torch.Tensor, tau: float = 1.0, logprobs: list[float] | None = None) -> float:
    """Soft-nearest-neighbour entropy, nats.

    Args:
        similarities: [n, n], the diagonal included.
        tau: temperature.
        logprobs: of each answer, nats; None: all weigh the same.
    """
    closeness = (similarities.double() / tau).logsumexp(1)
    if logprobs is None:
        return -float(closeness.mean())
    return -float(torch.tensor(logprobs, dtype=torch.float64).softmax(0) @ closeness)


PART = Snne
