"""Daemon: one answer drawn so that repetition, information, ... match those of a corpus (paper #25)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat

from decoding.aggregators._embeddings import embeddings
from decoding.aggregators.base import Aggregator, AnswerSet
from decoding.artifacts import ArtifactName
from decoding.metric_matching import Metric, metrics_of, tilt
from decoding.model import Model, ModelPool
from decoding.noise import Purpose, noise_key, uniform
from decoding.parts import Example, ModelShape
from decoding.sequence import Sequence
from decoding.steps import without_end
from turnout.registry import MethodParams

Coefficient = Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)]


class DaemonParams(MethodParams):
    """Parameters of `daemon`."""

    coefficients: Annotated[
        dict[Metric, Coefficient] | None,
        Field(max_length=8, description="mu by metric; 0 leaves a metric out; absent: those of the artifact"),
    ] = None
    artifact: ArtifactName = "daemon"


class Daemon(Aggregator):
    """Paper #25 (Language Model Decoding as Direct Metrics Optimization), sampling-importance-resampling.

    The law closest to the model's whose mean metrics are given is p(y) exp(-mu.f(y)). The drawn answers are weighted
    by exp(-mu.f), normalised over the request's answers, and one is drawn, with the request's seed. With all
    coefficients 0 that is the model's own law. `turnout train daemon` solves mu for a corpus.
    """

    Params = DaemonParams
    params: DaemonParams
    papers = (25,)
    score = "probability that it is drawn"

    @classmethod
    def example(cls, shape: ModelShape) -> Example:
        """See `Part.example`."""
        return Example({"coefficients": {"diversity": -2.0, "information": 0.5, "coherence": -1.0}}, kind=cls.name)

    def check(self, models: ModelPool) -> None:
        """Open the artifact, where one gives the coefficients.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: there is none of the name, or it does not fit.
        """
        self._mu: dict[Any, float] = dict(self.params.coefficients or {})
        if self.params.coefficients is None:
            found = models.artifacts.open(self.params.artifact, self.name, models, f"{self.where}.artifact").settings
            self._mu = dict(zip(found["metrics"], found["coefficients"], strict=True))

    async def choose(self, group: AnswerSet) -> int:
        """See `Aggregator.choose`."""
        seq, model, _ = group.context
        names = list(self._mu)
        answers = [each.ids for each in group.answers]
        values = await measured(model, seq, answers, [each.logprobs for each in group.answers], names)
        weights = tilt(values, torch.tensor(list(self._mu.values()), dtype=torch.float64))
        group.scores = weights.tolist()
        return draw(weights, uniform(noise_key(group.seed, len(seq), Purpose.SELECT)))


async def measured(
    model: Model,
    seq: Sequence,
    answers: list[tuple[int, ...]],
    logprobs: list[tuple[float, ...]],
    names: list[Metric],
) -> torch.Tensor:
    """Measure continuations of a sequence: float64 [n, k]; embeddings are read only for `coherence`."""
    cosines = [0.0] * len(answers)
    if "coherence" in names:
        vectors = await embeddings(model, seq, [tuple(seq.tokens), *answers])
        cosines = (vectors[1:] @ vectors[0]).tolist()

    def rows() -> list[list[float]]:
        return [
            metrics_of(without_end(ids, seq.end_ids) or ids, surprise, cosine, names)
            for ids, surprise, cosine in zip(answers, logprobs, cosines, strict=True)
        ]

    found = await asyncio.to_thread(rows)  # long answers take long
    return torch.tensor(found, dtype=torch.float64).reshape(len(found), len(names))


def draw(weights: torch.Tensor, point: float) -> int:
    """Return where a point in [0, 1) falls among weights that sum to 1."""
    place = int(torch.searchsorted(weights.cumsum(0), torch.tensor(point, dtype=weights.dtype), right=True))
    return min(place, len(weights) - 1)


PART = Daemon
