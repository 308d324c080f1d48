"""The switching slot: rules that say which model writes the next token, and the one program that obeys them.

A module here assigns its class to `RULE`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.artifacts import ArtifactName
from decoding.calibration import Knob
from decoding.model import Decision, Model, ModelPool, Request, Row, Until, Want
from decoding.sequence import Sequence
from decoding.stretch import stretch_lengths
from turnout.registry import MethodParams
from turnout.types import Segment

Role = Literal["small", "large"]
TARGETS = ("large_share", "quality")


def other(role: Role) -> Role:
    """The role that is not active."""
    return "large" if role == "small" else "small"


class CatchUp(StrEnum):
    """When the idle model reads what the active one wrote."""

    LAZY = "lazy"
    EAGER = "eager"
    SHADOW = "shadow"


class SwitchParams(MethodParams):
    """What every switching method lets the caller choose."""

    catch_up: Annotated[
        CatchUp,
        Field(
            description="when the idle model reads the text: lazy at the switch, eager reads the prompt at the "
            "start, shadow follows along in spare batch room"
        ),
    ] = CatchUp.LAZY


class CalibratedParams(SwitchParams):
    """Parameters of a switching method with a knob: set by hand, or read from a calibration.

    Attributes:
        knob: which parameter a calibration sets, and which it holds for.
    """

    knob: ClassVar[Knob]

    calibration: Annotated[
        ArtifactName | None,
        Field(description="the pool's calibration to read the setting from, without .safetensors; absent: by hand"),
    ] = None
    large_share: Annotated[
        FiniteFloat | None,
        Field(ge=0.0, le=1.0, description="with calibration: share of the tokens by the large model to aim at"),
    ] = None
    quality: Annotated[
        FiniteFloat | None,
        Field(gt=0.0, le=2.0, description="with calibration: quality to aim at, relative to the large model's own"),
    ] = None

    @model_validator(mode="after")
    def _check_calibration(self) -> Self:
        targets = [name for name in TARGETS if getattr(self, name) is not None]
        if self.calibration is None and targets:
            raise ValueError(f"{targets[0]} is read from a calibration: name one in calibration, or leave it out")
        if len(targets) > 1:
            raise ValueError("give large_share or quality, not both")
        if self.calibration is not None and self.by_hand:
            raise ValueError(f"give {self.knob.name} or calibration, not both")
        return self

    @property
    def by_hand(self) -> bool:
        """Whether the knob was set by the caller."""
        return self.knob.name in self.model_fields_set

    @property
    def knob_range(self) -> tuple[float, float]:
        """Settings of a knob that is no threshold, from least to most of the large model."""
        return 0.0, 1.0

    @classmethod
    def over(cls, defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """See `MethodParams.over`: a knob set by hand replaces a pool's calibration, and the other way round."""
        dropped: set[str] = set()
        if given.get(cls.knob.name) is not None:
            dropped = {"calibration", *TARGETS}
        elif given.get("calibration") is not None:
            dropped = {cls.knob.name, *TARGETS}
        elif set(TARGETS) & set(given):
            dropped = set(TARGETS)
        return {**{name: value for name, value in defaults.items() if name not in dropped}, **given}


class SwitchRule(Protocol):
    """A stop rule that owns the choice of model.

    `observe` is fed every generated token, whichever model wrote it, and changes `active` in the same call in
    which it returns STOP or DROP. State is plain and lives in instance attributes: a model elsewhere works on a
    copy, and whoever sent the rule takes the copy's attributes back.

    Attributes:
        active: the role that writes the next token.
    """

    name: str
    want: Want
    active: Role

    def observe(self, token: int, row: Row) -> Decision:
        """Look at the token about to be appended."""
        ...


async def alternate(
    request: Request, models: ModelPool, rule: SwitchRule, catch_up: CatchUp
) -> AsyncGenerator[Segment, None]:
    """Let whichever model the rule names write, until the answer ends. Seeds 2 and 202 differ only in the rule.

    The sequence is append-only and shared, so a switch moves nothing: the first forward of the newly active
    model reads what it lacks. `catch_up` changes when that reading is paid for, never which tokens come out.

    Args:
        request: its meter's `switches` counts.
        models: both roles filled.
        rule: who writes; ends a stretch when that changes.
        catch_up: when the idle model reads along.
    """
    seq, lengths, reader = request.sequence, stretch_lengths(), BackgroundReader()
    try:
        if catch_up is not CatchUp.LAZY:
            reader.start(models.role(other(rule.active)), seq)
        while not seq.finished:
            role = rule.active
            segment = await models.role(role).decode(seq, Until((rule,), max_tokens=next(lengths)))
            if segment.tokens:
                yield segment
            if rule.active != role and not seq.finished:
                seq.meter.switches += 1
                await reader.stop()
            if catch_up is CatchUp.SHADOW and not seq.finished:
                reader.start(models.role(other(rule.active)), seq)
    finally:
        await reader.stop()


class BackgroundReader:
    """At most one background catch-up of one sequence."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, model: Model, seq: Sequence) -> None:
        """Let `model` absorb `seq`, unless an earlier reading is still under way."""
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()

        async def absorb() -> None:
            await model.absorb(seq)

        self._task = asyncio.create_task(absorb())

    async def stop(self) -> None:
        """End the reading: a model that is to decode now reads the rest in its own forward.

        Raises:
            Exception: whatever a reading that was not cancelled failed with.
        """
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
