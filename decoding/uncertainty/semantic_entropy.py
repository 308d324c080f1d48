"""Semantic entropy: of the meanings of sampled answers, which a judge of entailment tells apart (paper #113)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Annotated, Literal

from pydantic import Field

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.entailment.base import PACKAGE, EntailmentJudge, JudgeChoice, clusters_of
from decoding.model import ModelPool
from decoding.uncertainty.base import SampledParams, SampledUncertainty
from turnout.part_choice import PartChoice

Estimator = Literal["normalised", "original", "discrete"]


class SemanticEntropyParams(SampledParams):
    """Parameters of `semantic_entropy`."""

    estimator: Annotated[
        Estimator,
        Field(
            description="normalised: entropy of the clusters' probabilities, which sum to 1; original: minus their mean"
            " log-probability; discrete: entropy of the shares of samples"
        ),
    ] = "normalised"
    by_length: Annotated[
        bool, Field(description="whether an answer's log-probability is the mean over its tokens, not the sum")
    ] = True
    judge: Annotated[
        JudgeChoice, Field(description="who tells whether one answer implies another; `turnout parts entailment`")
    ] = PartChoice(name="asked")


class SemanticEntropy(SampledUncertainty):
    """Paper #113 (semantic entropy): sampled answers are clustered by bidirectional entailment.

    An answer joins the first cluster whose first member it implies, and which implies it, both as answers to the
    question. The value is in nats: 0 where all samples mean the same, ln n where n equally likely ones all differ.
    """

    Params = SemanticEntropyParams
    params: SemanticEntropyParams
    papers = (113,)
    unit = "nats"
    meaning = "entropy of the meanings of sampled answers; 0: all mean the same"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """See `Uncertainty.bounds`."""
        return (None, None) if self.params.estimator == "original" else (0.0, math.log(self.params.samples))

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        self._judge: EntailmentJudge = self.params.judge.make(PACKAGE, f"{self.where}.judge")
        self._judge.check(models)

    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        """See `Uncertainty.measure`."""
        clusters = await clusters_of(self._judge, group)
        group.measures["semantic_clusters"] = float(len(set(clusters)))
        group.scores, group.groups = group.likelihoods, [f"meaning {cluster + 1}" for cluster in clusters]
        logprobs = [log_likelihood(each, self.params.by_length) for each in group.answers]
        return entropy_of_clusters(clusters, logprobs, self.params.estimator)


def log_likelihood(answer: Candidate, by_length: bool) -> float:
    """Return an answer's log-probability in nats, or its mean over the tokens."""
    return answer.mean_logprob if by_length else sum(answer.logprobs)


def entropy_of_clusters(clusters: Items[int], logprobs: Items[float], estimator: Estimator) -> float:
    """Entropy of clusters of answers, nats.

    Args:
        clusters: of each answer, numbered from 0.
        logprobs: of each answer, nats; not looked at by `discrete`.
        estimator: see `SemanticEntropyParams`.
    """
    count = max(clusters) + 1
    if estimator == "discrete":
        shares = [clusters.count(cluster) / len(clusters) for cluster in range(count)]
        return -sum(share * math.log(share) for share in shares)
    members = [[logprobs[i] for i, each in enumerate(clusters) if each == cluster] for cluster in range(count)]
    masses = [_logsumexp(each) for each in members]
    if estimator == "original":
        return -sum(masses) / count
    total = _logsumexp(masses)
    return -sum(math.exp(mass - total) * (mass - total) for mass in masses)


def _logsumexp(values: Items[float]) -> float:
    most = max(values)
    return most + math.log(sum(math.exp(value - most) for value in values)) if math.isfinite(most) else most


PART = SemanticEntropy
