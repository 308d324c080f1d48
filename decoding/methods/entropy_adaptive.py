"""Entropy Adaptive Decoding: the large model writes while the text is uncertain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.calibrated_params import CalibratedParams, calibrated, finish, recorder
from decoding.calibration import TunableParam
from decoding.model import ModelPool, Request
from decoding.switching.base import SwitchParams, alternate
from decoding.switching.mean_entropy import MeanEntropySwitch
from turnout.registry import method
from turnout.types import Segment


class EntropyAdaptiveParams(SwitchParams, CalibratedParams):
    """Parameters of `entropy_adaptive`."""

    example: ClassVar[Mapping[str, Any]] = {"threshold": 2.0, "window": 2, "min_stay": 1}
    knob: ClassVar[TunableParam] = TunableParam(
        "threshold",
        fixed=(
            "window",
            "min_stay",
            "min_stay_small",
            "effect",
            "effect_back",
            "threshold_down",
            "start",
            "clear_on_switch",
        ),
        never=64.0,  # bits; no mean entropy is above it
        falling=True,
    )

    window: Annotated[int, Field(ge=1, le=1024, description="entropies in the rolling mean, tokens")] = 5
    min_stay: Annotated[int, Field(ge=1, le=1_000_000, description="tokens a model writes before it may hand over")] = (
        10
    )
    min_stay_small: Annotated[
        int | None,
        Field(
            ge=0,
            le=1_000_000,
            description="the same for the small model alone; with effect current, 0 lets its first token be dropped;"
            " absent: min_stay",
        ),
    ] = None
    threshold: Annotated[
        FiniteFloat, Field(ge=-1.0, le=64.0, description="mean entropy above which the large model takes over, bits")
    ] = 0.5
    threshold_down: Annotated[
        FiniteFloat | None,
        Field(ge=-1.0, le=64.0, description="mean at or below which the small one takes back; absent: threshold"),
    ] = None
    start: Annotated[Literal["small", "large"], Field(description="who writes first")] = "small"
    effect: Annotated[
        Literal["next", "current"],
        Field(description="whether a switch acts on the next token, or drops the current one and draws it again"),
    ] = "next"
    effect_back: Annotated[
        Literal["next", "current"] | None,
        Field(description="the same where the large model hands back; absent: effect"),
    ] = None
    clear_on_switch: Annotated[
        bool | None, Field(description="empty the window at a switch; absent: only if a stay is shorter")
    ] = None

    @property
    def always(self) -> float | None:
        """See `CalibratedParams.always`; a band's upper threshold ends at the lower one."""
        return -1.0 if self.threshold_down is None else None

    @model_validator(mode="after")
    def _check_band(self) -> Self:
        by_hand = self.calibration is None
        if by_hand and self.threshold_down is not None and self.threshold_down > self.threshold:
            raise ValueError(f"threshold_down must be at most threshold ({self.threshold:g})")
        return self


@method(params=EntropyAdaptiveParams, papers=(2,), lossless=False, needs=frozenset({"small", "large"}))
async def entropy_adaptive(
    request: Request, models: ModelPool, params: EntropyAdaptiveParams
) -> AsyncIterator[Segment]:
    """The large model writes while the rolling mean of the active model's entropy is high.

    Paper #2 (Entropy Adaptive Decoding). Each token follows the law of the model in its `source`.
    """
    params, watched = calibrated(request, models, params, "entropy_adaptive")
    rule = MeanEntropySwitch(
        window=params.window,
        min_stay=params.min_stay,
        min_stay_small=params.min_stay_small,
        threshold=params.threshold,
        threshold_down=params.threshold_down,
        active=params.start,
        effect=params.effect,
        effect_back=params.effect_back,
        clear=params.clear_on_switch,
        tally=recorder(request, watched),
    )
    async with aclosing(alternate(request, models, rule, params.catch_up)) as segments:
        async for segment in segments:
            yield segment
    finish(request, watched, rule.tally)
