"""Random switching between the models: the baseline for every switching rule."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, ClassVar, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.calibrated_params import CalibratedParams, calibrated
from decoding.calibration import TunableParam
from decoding.model import ModelPool, Request
from decoding.switching.base import SwitchParams, alternate
from decoding.switching.random_run import RandomRunSwitch, Start, mean_runs
from turnout.registry import method
from turnout.types import Segment


class RandomSwitchParams(SwitchParams, CalibratedParams):
    """Parameters of `random_switch`."""

    knob: ClassVar[TunableParam] = TunableParam("share", fixed=("mean_run", "min_stay", "start"))

    share: Annotated[FiniteFloat, Field(ge=0.0, le=1.0, description="share of tokens the large model writes")] = 0.3
    mean_run: Annotated[FiniteFloat, Field(ge=1.0, le=1e6, description="mean run length over both models, tokens")] = (
        20.0
    )
    min_stay: Annotated[int, Field(ge=1, le=1_000_000, description="shortest run of one model, tokens")] = 10
    start: Annotated[
        Start,
        Field(
            description="who writes first: small, as entropy_adaptive, whose baseline this is; large; or drawn, large"
            " with probability share"
        ),
    ] = "small"

    @property
    def knob_range(self) -> tuple[float, float]:
        """Shares at which no model's mean run is below the shortest one."""
        least = self.min_stay / (2.0 * self.mean_run)
        return least, 1.0 - least

    @model_validator(mode="after")
    def _check_runs(self) -> Self:
        if self.calibration is None:
            mean_runs(self.share, self.mean_run, self.min_stay)
        return self


@method(params=RandomSwitchParams, lossless=False, needs=frozenset({"small", "large"}))
async def random_switch(request: Request, models: ModelPool, params: RandomSwitchParams) -> AsyncIterator[Segment]:
    """The models take turns at random, with a chosen share and run length; the baseline of switching rules.

    Each token follows the law of the model in its `source`. The turns are keyed by the request's seed.
    """
    params, _ = calibrated(request, models, params, "random_switch")
    seq = request.sequence
    rule = RandomRunSwitch(
        share=params.share,
        mean_run=params.mean_run,
        min_stay=params.min_stay,
        seed=seq.seed,
        position=len(seq),
        start=params.start,
    )
    async with aclosing(alternate(request, models, rule, params.catch_up)) as segments:
        async for segment in segments:
            yield segment
