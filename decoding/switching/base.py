"""The switching slot: rules that say which model writes the next token, and the one program that obeys them.

A module here assigns its class to `RULE`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Annotated, Literal, Protocol

from pydantic import Field

from decoding.decode_loop import stretch_lengths
from decoding.model import Decision, Model, ModelPool, Readout, ReadSpec, Request, StopCondition
from decoding.sequence import Sequence
from turnout.registry import MethodParams
from turnout.types import Segment

Role = Literal["small", "large"]


def other(role: Role) -> Role:
    """The role that is not active."""
    return "large" if role == "small" else "small"


class CatchUp(StrEnum):
    """When the idle model reads what the active one wrote."""

    LAZY = "lazy"
    EAGER = "eager"
    SHADOW = "shadow"


class SwitchParams(MethodParams):
    """Parameters of every switching method."""

    catch_up: Annotated[
        CatchUp,
        Field(
            description="when the idle model reads the text: lazy at the switch, eager reads the prompt at the "
            "start, shadow follows along in spare batch room"
        ),
    ] = CatchUp.LAZY


class SwitchRule(Protocol):
    """A stop rule that owns the choice of model.

    `observe` is fed every generated token, whichever model wrote it, and changes `active` in the same call in
    which it returns STOP or DROP. State is plain and lives in instance attributes: a model elsewhere works on a
    copy, and the sender of the rule takes the copy's attributes back.

    Attributes:
        active: the role that writes the next token.
    """

    name: str
    want: ReadSpec
    active: Role

    def observe(self, token: int, row: Readout) -> Decision:
        """Look at the token about to be appended."""
        ...


async def alternate(
    request: Request, models: ModelPool, rule: SwitchRule, catch_up: CatchUp
) -> AsyncGenerator[Segment, None]:
    """Let whichever model the rule names write, until the answer ends. Papers #2 and #202 differ only in the rule.

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
            reader.start(models.by_role(other(rule.active)), seq)
        length = next(lengths)
        while not seq.finished:
            role = rule.active
            segment = await models.by_role(role).decode(seq, StopCondition((rule,), max_tokens=length))
            if segment.tokens:
                yield segment
                length = next(lengths)  # a token that was dropped brought the client nothing
            if rule.active != role and not seq.finished:
                seq.meter.switches += 1
                await reader.stop()
            if catch_up is CatchUp.SHADOW and not seq.finished:
                reader.start(models.by_role(other(rule.active)), seq)
    finally:
        await reader.stop()


class BackgroundReader:
    """At most one background catch-up of one sequence."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, model: Model, seq: Sequence) -> None:
        """Let `model` read `seq` ahead, unless an earlier reading is still under way."""
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()

        async def prefill_ahead() -> None:
            await model.prefill_ahead(seq)

        self._task = asyncio.create_task(prefill_ahead())

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
