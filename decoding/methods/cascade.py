"""The small model answers; where it was not sure of what it wrote, the large one answers instead."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Items
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.aggregators.base import Candidate
from decoding.calibrated_params import CalibratedParams, calibrated, finish, recorder
from decoding.calibration import TunableParam
from decoding.candidates import MARK, charge, show
from decoding.decode_loop import stream
from decoding.model import Model, ModelPool, Request, StopCondition
from decoding.recorder import Watch
from decoding.sequence import Sequence
from decoding.uncertainty.base import doubt_of, make_uncertainty, settle_doubt
from turnout.errors import FieldError
from turnout.part_choice import PartChoice
from turnout.registry import method
from turnout.types import FinishReason, Segment

Confidence = Literal["logprob", "least_logprob", "entropy"]
UNMEASURED = 1e6  # the answer that is there stays
LIMIT = 1000.0  # of thresholds; what they are compared with is above its negative, and below it


class Measured(Protocol):
    """A token with what was measured of it."""

    @property
    def logprob(self) -> float | None:
        """Its log-probability, nats."""
        ...

    @property
    def entropy_bits(self) -> float | None:
        """Entropy of what it was drawn from, bits."""
        ...


class CascadeParams(CalibratedParams):
    """Parameters of `cascade`."""

    example: ClassVar[Mapping[str, Any]] = {"threshold": -1.0}
    knob: ClassVar[TunableParam] = TunableParam(
        "threshold", fixed=("confidence", "keep_cut", "uncertainty"), never=-LIMIT
    )

    confidence: Annotated[
        Confidence,
        Field(
            description="what of the small model's answer is compared: logprob, the mean log-probability of its tokens"
            " (nats); least_logprob, the lowest one (nats); entropy, minus their mean entropy (bits)"
        ),
    ] = "logprob"
    uncertainty: Annotated[
        PartChoice | None,
        Field(
            description="what measures the small model's doubt, minus which is then compared instead of `confidence`;"
            " `turnout parts uncertainty`",
            json_schema_extra={"x-slot": "uncertainty"},
        ),
    ] = None
    threshold: Annotated[
        FiniteFloat,
        Field(
            ge=-LIMIT,
            le=LIMIT,
            description="confidence below which the large model answers; 1: always, 1000 with `uncertainty`",
        ),
    ] = -0.05
    keep_cut: Annotated[
        bool, Field(description="whether an answer that reached max_tokens may be kept; otherwise it never is")
    ] = False

    @model_validator(mode="after")
    def _check_uncertainty(self) -> Self:
        if self.uncertainty is not None:
            make_uncertainty(self.uncertainty)
        elif self.threshold > 1.0:
            raise FieldError("threshold", "must be at most 1 without `uncertainty`: no other confidence is above 0")
        return self

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        if self.uncertainty is not None:
            make_uncertainty(self.uncertainty).check(models)

    @property
    def beyond_text(self) -> str:
        """See `MethodParams.beyond_text`."""
        return "" if self.uncertainty is None else "uncertainty"

    @property
    def always(self) -> float:
        """See `CalibratedParams.always`."""
        return 1.0 if self.uncertainty is None else LIMIT


@method(params=CascadeParams, lossless=False, needs=frozenset({"small", "large"}), over_text=True)
async def cascade(request: Request, models: ModelPool, params: CascadeParams) -> AsyncIterator[Segment]:
    """The small model answers, and the large one does instead where the small one was unsure of what it wrote.

    Every answer is one model's: that of plain decoding by the small or by the large model, with the request's seed.
    What was shown is never taken back: the small model's answer is held until it is decided, then comes at once; the
    large model's streams as it is written. The cost counts both.
    """
    params, watching = calibrated(request, models, params, "cascade")
    values = recorder(request, watching)
    params.check_parts(models)
    seq = request.sequence
    draft = models.small.fork(seq)
    try:
        found = await _write(models.small, draft, params.confidence)
        if params.uncertainty is not None:
            found = await _sureness(params.uncertainty, request, draft, models)
        if values is not None:
            if found != UNMEASURED:
                values.add(found)
            finish(request, watching, values)
        whole = params.keep_cut or draft.finish_reason is not FinishReason.LENGTH
        kept = whole and found >= params.threshold
        if params.uncertainty is not None:
            settle_doubt(request, params.uncertainty.name, -params.threshold, "kept" if kept else "deferred")
        if kept:
            segment = show(seq, draft, models)
        else:
            charge(seq, draft)
    finally:
        models.small.release(draft)
    if kept:
        yield segment
        return
    seq.meter.switches += 1
    async with aclosing(stream(models.large, seq, request.streams)) as segments:  # type: ignore[type-var]
        async for segment in segments:
            yield segment


async def _sureness(choice: PartChoice, request: Request, draft: Sequence, models: ModelPool) -> float:
    """Minus the small model's doubt about the answer it has written; above every threshold where it is not measured."""
    part, seq, small = make_uncertainty(choice), request.sequence, models.small
    part.check(models)
    answer = Candidate.of(draft, len(seq.generated), models, MARK)
    doubt = await doubt_of(part, request, seq, small, models, answer)
    return UNMEASURED if doubt is None else min(max(-doubt, -LIMIT), LIMIT - 1.0)


async def _write(model: Model, draft: Sequence, kind: Confidence) -> float:
    """Write an answer to its end; its confidence."""
    watch = Watch()
    await model.decode(draft, StopCondition((watch,)))
    return confidence(draft.generated, kind, watch.allowed)


def confidence(tokens: Items[Measured], kind: Confidence, allowed: list[float] | None = None) -> float:
    """Return a model's confidence in its answer: the higher, the surer.

    Where a structure holds, probabilities are those among the tokens it allows, and tokens that it forces do not count:
    the model did not choose them.

    Args:
        tokens: the answer's, with log-probabilities and entropies.
        kind: see `CascadeParams`.
        allowed: `Watch.allowed` of these tokens; None or empty: no structure held.

    Returns:
        Nats, or bits for entropy; 0.0 where every token was forced.

    Raises:
        ValueError: there is no token.
    """
    if not tokens:
        raise ValueError("an answer without a token has no confidence")
    pairs = zip(tokens, allowed or [0.0] * len(tokens), strict=True)
    free = [(token, together) for token, together in pairs if not math.isnan(together)]
    if not free:
        return 0.0
    if kind == "entropy":
        return -sum(token.entropy_bits or 0.0 for token, _ in free) / len(free)
    values = [(token.logprob or 0.0) - together for token, together in free]
    return min(values) if kind == "least_logprob" else sum(values) / len(values)
