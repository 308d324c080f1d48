"""Any method under the eyes of a monitor, which may put words into the answer or have it go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Self

from pydantic import Field, model_validator

from decoding.calibrated_params import check_method
from decoding.calibration import RAN
from decoding.model import ModelPool, Request
from decoding.monitors.base import PACKAGE as MONITORS
from decoding.monitors.base import Injection, Monitor
from decoding.sequence import Sequence
from turnout.errors import FieldError, invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodInfo, MethodParams, get_method, method
from turnout.types import Segment, Token

FIELD = "method.params"
# Injected tokens were written by no model.
SOURCE = "injected"


class MonitoredParams(MethodParams):
    """Parameters of `monitored`. Method and monitor are a name, or an object of the name and parameters."""

    inner: Annotated[
        PartChoice,
        Field(
            description="the method that writes, which must append as it goes", json_schema_extra={"x-slot": "methods"}
        ),
    ] = PartChoice(name="plain")
    monitor: Annotated[
        PartChoice,
        Field(
            description="who watches: trim, enough; `turnout parts monitors`", json_schema_extra={"x-slot": "monitors"}
        ),
    ] = PartChoice(name="trim")

    @model_validator(mode="after")
    def _check(self) -> Self:
        info = get_method(self.inner.name, f"{FIELD}.inner")
        info.parse(self.inner.params, f"{FIELD}.inner")
        if info.joint:
            raise FieldError("inner", f"{info.name!r} writes all answers of a request together and cannot be monitored")
        self.monitor.find(MONITORS, f"{FIELD}.monitor")
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Roles that the inner method needs."""
        return get_method(self.inner.name, f"{FIELD}.inner").needs

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`; what is inside may be calibrated, too."""
        inner = get_method(self.inner.name, f"{FIELD}.inner")
        params = inner.parse(self.inner.params, f"{FIELD}.inner").untimed()
        check_method(models, inner.name, params, f"{FIELD}.inner")
        monitor: Monitor = self.monitor.make(MONITORS, f"{FIELD}.monitor")
        monitor.check(models)


@method(params=MonitoredParams, papers=(21, 184), lossless=False, needs=frozenset({"small", "large"}), drafts=True)
async def monitored(request: Request, models: ModelPool, params: MonitoredParams) -> AsyncIterator[Segment]:
    """Any method writes; a monitor watches, puts words into the answer, or has a finished one reconsidered.

    Papers #184 (TrimR) and #21 (Think Just Enough), which differ in the monitor. The inner method begins anew after
    every intervention, on the same sequence, whose cached prefix stays; between interventions its law holds. Injected
    tokens have a source of their own and count towards the answer's length.
    """
    inner = get_method(params.inner.name, f"{FIELD}.inner")
    if request.sequence.sampling.structure is not None:
        raise invalid("structure", "does not go with method 'monitored', which puts words of its own into the answer")
    monitor: Monitor = params.monitor.make(MONITORS, f"{FIELD}.monitor")
    monitor.begin(request, models)
    request.streams = False  # words are put in where a segment ends
    seq = request.sequence
    asked = seq.sampling
    if monitor.top:
        shown = max(asked.logprobs or 0, monitor.top)
        seq.sampling = asked.model_copy(update={"logprobs": shown})
    try:
        async with aclosing(_watched(request, models, inner, params, monitor)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                yield segment if seq.sampling is asked else _as_asked(segment, asked.logprobs)
    finally:
        seq.sampling = asked
        await monitor.close()
        if (ran := request.extra.pop(RAN, None)) is not None:
            # Its rounds are those of one run of several, which repeat nothing.
            mine = {name: value for name, value in ran.items() if name != "rounds"}
            request.extra[RAN] = {"inner": {"name": params.inner.name, **params.inner.params, **mine}}


async def _watched(
    request: Request, models: ModelPool, inner: MethodInfo, params: MonitoredParams, monitor: Monitor
) -> AsyncIterator[Segment]:
    """The inner method's segments and the injected ones."""
    seq = request.sequence
    # Monitors step in where segments end, and must again if the answer is made again.
    parsed = inner.parse(params.inner.params, f"{FIELD}.inner").untimed()
    while True:
        injection = None
        async with aclosing(inner.run(request, models, parsed)) as segments:  # type: ignore[type-var]
            async for segment in segments:
                _check_appended(seq, segment, inner.name)
                monitor.watch(segment)
                yield segment
                injection = None if seq.finished else _asked(monitor, request, ended=False)
                if injection is not None:
                    break
        if injection is None and seq.can_reopen:
            injection = _asked(monitor, request, ended=True)
            if injection is not None:
                seq.reopen()
        if injection is None:
            return
        yield _inject(seq, injection)
        if seq.finished:
            return


def _asked(monitor: Monitor, request: Request, ended: bool) -> Injection | None:
    """Return the injection here: the monitor's, or that of the first time if the answer is written again."""
    seq = request.sequence
    place = len(seq.generated)
    rest = request.delivered[place:]
    if not rest:
        return monitor.at_end() if ended else monitor.intervene()
    room = seq.sampling.max_tokens - place

    def then(words: tuple[int, ...]) -> bool:
        return rest[: len(words)] == words[:room]

    return monitor.again(then, ended)


def _inject(seq: Sequence, injection: Injection) -> Segment:
    tokens = seq.extend((Token(token, SOURCE) for token in injection.tokens), {SOURCE: 0})
    return Segment(tokens, injection.reason)


def _check_appended(seq: Sequence, segment: Segment, name: str) -> None:
    """Words can only be put into an answer that stands where its stream is."""
    count = len(segment.tokens)
    if count and seq.generated[-1] != segment.tokens[-1]:
        raise invalid(f"{FIELD}.inner", f"{name!r} does not append what it writes as it goes, so it cannot be watched")


def _as_asked(segment: Segment, logprobs: int | None) -> Segment:
    """Without what only the monitor asked for."""
    kept = logprobs or 0
    tokens = tuple(
        token._replace(logprob=token.logprob if logprobs is not None else None, top=token.top[:kept])
        for token in segment.tokens
    )
    return Segment(tokens, segment.stopped_by)
