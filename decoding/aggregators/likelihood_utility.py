"""Likelihood mixed with a value, which are compared: does the likely answer have the greater value? (paper #26)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.aggregators.base import AggregatorChoice, AnswerSet, ValuedAggregator, make_valued
from decoding.alignment import Alignment, recommended
from decoding.model import ModelPool, StopRule
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams

STORE = "likelihood_utility"


class LikelihoodUtilityParams(MethodParams):
    """Parameters of `likelihood_utility`."""

    value: Annotated[AggregatorChoice, Field(description="an aggregator whose values stand for the utility")] = (
        PartChoice(name="mbr")
    )
    weight: Annotated[
        FiniteFloat, Field(ge=0.0, le=1.0, description="of the value; the mean log-probability has the rest")
    ] = 0.5


class LikelihoodUtility(ValuedAggregator):
    """Paper #26 (Language Model Decoding as Likelihood-Utility Alignment): (1 - w) mean log p + w V.

    The answer's usage says how likelihood and value agree: tau-b within the request, and over the tenant's last
    requests with the same value, with the decoder that follows: `likelihood` for a strong positive correlation,
    `rerank` for a weak one, `value` for a negative one. Weight 0 is `logprob`, weight 1 the value alone.
    """

    Params = LikelihoodUtilityParams
    params: LikelihoodUtilityParams
    papers = (26,)
    score = "mean log-probability in nats, and the value, mixed by `weight`"
    reads_logprobs = True

    def __init__(self, params: LikelihoodUtilityParams | None = None) -> None:
        super().__init__(params)
        self._value = make_valued(self.params.value, f"{self.where}.value")

    def check(self, models: ModelPool) -> None:
        """See `Part.check`."""
        self._value.check(models)

    def rule(self) -> StopRule | None:
        """See `Aggregator.rule`."""
        return self._value.rule()

    async def values(self, group: AnswerSet) -> list[float]:
        """See `ValuedAggregator.values`."""
        utilities, likely, weight = await self._value.values(group), group.likelihoods, self.params.weight
        if len(likely) > 1:
            self._report(group, likely, utilities)
        return [(1.0 - weight) * a + weight * b for a, b in zip(likely, utilities, strict=True)]

    def _report(self, group: AnswerSet, likely: list[float], utilities: list[float]) -> None:
        seq, model, _ = group.context
        kept = model.stores.open(f"{STORE}/{self.params.value.model_dump_json()}", seq.learner, Alignment)
        kept.add(likely, utilities)
        group.measures["likelihood_utility_tau"] = kept.taus[-1]
        group.measures["likelihood_utility_tau_pooled"] = kept.within
        group.measures["likelihood_utility_correlation_pooled"] = kept.across
        advice = f"likelihood and value: tau {kept.within:.2f} over {len(kept.inputs)} requests"
        group.notes.append(f"{advice}; recommended: {recommended(kept.within)}")


PART = LikelihoodUtility
