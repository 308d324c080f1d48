"""Step speculation: the small model drafts reasoning steps, a scorer keeps them or has the large model redo them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.calibrated_params import CalibratedParams, calibrated, finish, recorder
from decoding.calibration import TunableParam
from decoding.decode_loop import stream, stretch_lengths
from decoding.drafters.base import DraftBudget
from decoding.drift import Recorder
from decoding.lengths.fixed import FixedLength
from decoding.methods.speculative import SpeculativeParams, checked_parts
from decoding.model import Model, ModelPool, Request, StopCondition
from decoding.scorers.base import PACKAGE as SCORERS
from decoding.scorers.base import Scorer
from decoding.speculation import Speculation
from decoding.steps import (
    StepDrafter,
    StepEnd,
    StepRule,
    WithinStep,
    keep_coin,
    step_marks,
    tokens_written,
)
from decoding.text import text_within
from decoding.thinking import ThinkingWalk
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.registry import method
from turnout.types import Segment

FIELD = "method.params"

Mark = Annotated[str, Field(min_length=1, max_length=64)]


class StepSpeculationParams(CalibratedParams):
    """Parameters of `step_speculation`."""

    example: ClassVar[Mapping[str, Any]] = {
        "separators": [";"],
        "max_step_tokens": 6,
        "scorer": {"name": "self_grade", "threshold": 4.5, "reading": "expected", "question": "grade"},
    }
    knob: ClassVar[TunableParam] = TunableParam(
        "threshold",
        fixed=("scorer", "separators", "max_step_tokens", "max_steps", "first_steps", "end_marks", "rest"),
        never=0.0,
    )

    scorer: Annotated[
        PartChoice,
        Field(
            description="judges drafted steps: self_grade, reward_model; `turnout parts scorers`",
            json_schema_extra={"x-slot": "scorers"},
        ),
    ] = PartChoice(name="self_grade")
    threshold: Annotated[
        FiniteFloat | None,
        Field(ge=0.0, le=10.0, description="least score of a drafted step that stays; absent: what the scorer says"),
    ] = None
    separators: Annotated[
        tuple[Mark, ...],
        Field(min_length=1, max_length=16, description="strings that end a step; for chat models often a blank line"),
    ] = ("\n",)
    max_step_tokens: Annotated[int, Field(ge=1, le=4096, description="longest step, tokens")] = 512
    max_steps: Annotated[int, Field(ge=1, le=10_000, description="steps after which nothing is drafted any more")] = 100
    first_steps: Annotated[int, Field(ge=0, le=10_000, description="steps at the start written by the large model")] = 0
    end_marks: Annotated[
        tuple[Mark, ...] | None,
        Field(
            max_length=16,
            description="after a step with one of these nothing is drafted any more; absent: after the end of thinking,"
            " as the pool's `reasoning` finds it",
        ),
    ] = None
    rest: Annotated[
        Literal["small", "large", "nobody"],
        Field(
            description="writer of the rest after an end mark, the last of max_steps, or a step that repeats the"
            " one before it; `nobody`: the answer ends there"
        ),
    ] = "large"
    speculate: Annotated[
        SpeculativeParams | None,
        Field(description="parameters of `speculative` for the large model's own steps; absent: decoded plainly"),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = self._threshold_of_scorer()
        if own in self.scorer.params and (self.threshold is not None or self.calibration is not None):
            raise invalid(f"{FIELD}.scorer.{own}", "is given twice: leave it out, or threshold and calibration")
        self.judge()
        if self.speculate is not None and self.speculate.refused:
            raise invalid(f"{FIELD}.speculate", self.speculate.refused)
        if self.speculate is not None and not self.speculate.lossless:
            raise invalid(f"{FIELD}.speculate.verifier", "must be lossless: the large model's steps are its own")
        return self

    @property
    def soft(self) -> str:
        """See `CalibratedParams.soft`."""
        own = self.judge().soft
        return f"scorer.{own}" if own else ""

    @property
    def always(self) -> float:
        """See `CalibratedParams.always`."""
        return self.judge().keeps_none

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        self.judge().check(models)
        if self.speculate is not None:
            self.speculate.untimed().check_parts(models)

    def judge(self) -> Scorer:
        """The scorer, with the threshold where one is given.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: an unknown scorer, or a wrong parameter of it.
        """
        given = {} if self.threshold is None else {self._threshold_of_scorer(): self.threshold}
        chosen = PartChoice.of(self.scorer.name, **self.scorer.params, **given)
        scorer: Scorer = chosen.make(SCORERS, f"{FIELD}.scorer")
        return scorer

    def _threshold_of_scorer(self) -> str:
        part = self.scorer.find(SCORERS, f"{FIELD}.scorer")
        assert issubclass(part, Scorer)
        return part.threshold


@method(
    params=StepSpeculationParams, papers=(39, 221), lossless=False, needs=frozenset({"small", "large"}), drafts=True
)
async def step_speculation(
    request: Request, models: ModelPool, params: StepSpeculationParams
) -> AsyncIterator[Segment]:
    """The small model drafts whole steps; a scorer keeps them, or the large model writes them anew.

    Papers #221 (SpecReason) and #39 (Reward-Guided Speculative Decoding), which differ in the scorer. A step z has the
    law w(z) P_small(z) + (1 - E[w]) P_large(z), with w(z) the chance that the scorer keeps z; tokens of a kept step
    follow the small model's law, all others the large one's. The meter's generated and discarded tokens of the small
    model count drafts that were kept and that were not; the large model's generated tokens are its own.
    """
    params, watching = calibrated(request, models, params, "step_speculation")
    values = recorder(request, watching)
    scorer = params.judge()
    scorer.check(models)
    vocab_size = max(models.small.vocab_size, models.large.vocab_size)
    # Reads the whole vocabulary the first time.
    marks = await asyncio.to_thread(step_marks, models.tokenizer, vocab_size, params.separators)
    steps = _Steps(request, models, params, scorer, values, StepEnd(marks, params.separators))
    async with aclosing(steps.run()) as segments:
        async for segment in segments:
            yield segment
    finish(request, watching, values)


class _Steps:
    """One answer, step by step."""

    def __init__(
        self,
        request: Request,
        models: ModelPool,
        params: StepSpeculationParams,
        scorer: Scorer,
        values: Recorder | None,
        end: StepEnd,
    ) -> None:
        self._request = request
        self._seq = request.sequence
        self._models = models
        self._params = params
        self._scorer = scorer
        self._values = values
        self._end = end
        self._writer: Model | None = None
        greedy = request.sequence.sampling.greedy
        # The last round of a step may pass its limit: no time decides how far.
        own = params.speculate.untimed() if params.speculate is not None else None
        self._parts = checked_parts(own.chosen(models, greedy), models) if own is not None else None

    async def run(self) -> AsyncGenerator[Segment, None]:
        """Segments: a kept step at once, the large model's as it writes."""
        seq, params = self._seq, self._params
        before: list[int] = []
        walk = ThinkingWalk(seq.thinking, self._models.tokenizer) if seq.thinking is not None else None
        for index in range(params.max_steps):
            if seq.finished:
                return
            start = len(seq)
            kept = await self._drafted() if index >= params.first_steps else None
            if kept is not None:
                yield kept
            else:
                async with aclosing(self._by_large()) as segments:
                    async for segment in segments:
                        yield segment
            step = seq.tokens[start:]
            if step == before or self._marks_end(step, walk):
                break
            before = step
        if params.rest != "nobody" and not seq.finished:
            rest = self._models.by_role(params.rest)
            self._written_by(rest)
            async for segment in stream(rest, seq):
                yield segment

    async def _drafted(self) -> Segment | None:
        """The small model's step if it is kept; else nothing is appended."""
        seq, small = self._seq, self._models.small
        most = min(self._params.max_step_tokens, seq.num_remaining)
        draft = await small.propose(seq, StepDrafter(self._end), DraftBudget(most, most), FixedLength())
        score = await self._scorer.score(self._models, seq, draft.tokens)
        if self._values is not None:
            self._values.add(score)
        if not keep_coin(seq) < self._scorer.chance(score):
            seq.meter.of(small.name, small.num_parameters).discarded_tokens += len(draft)
            return None
        self._written_by(small)
        tokens = await tokens_written(small, seq, draft.tokens)
        appended = seq.extend(tokens, self._models.sizes)
        return Segment(appended, "finish" if seq.finished else "step")

    async def _by_large(self) -> AsyncGenerator[Segment, None]:
        """The large model's own step, in stretches or in rounds of speculation; the last round may pass the limit."""
        left = self._params.max_step_tokens
        self._written_by(self._models.large)
        self._end.reset()
        async with aclosing(self._rounds() if self._parts is not None else self._stretches(left)) as segments:
            async for segment, ended in segments:
                yield segment
                left -= len(segment.tokens)
                if ended or left <= 0:
                    return

    async def _stretches(self, left: int) -> AsyncGenerator[tuple[Segment, bool], None]:
        """Segments, and whether the step ended with them."""
        seq, lengths, rule = self._seq, stretch_lengths(), StepRule(self._end)
        while not seq.finished and left > 0:
            segment = await self._models.large.decode(seq, StopCondition((rule,), max_tokens=min(next(lengths), left)))
            left -= len(segment.tokens)
            yield segment, segment.stopped_by == rule.name

    async def _rounds(self) -> AsyncGenerator[tuple[Segment, bool], None]:
        """Segments, and whether the step ended with them."""
        assert self._parts is not None
        arms, selector, verifier = self._parts
        within = WithinStep(verifier, self._end)
        async with aclosing(Speculation(self._request, self._models, arms, selector, within).run()) as rounds:
            async for segment in rounds:
                yield segment, within.ended

    def _marks_end(self, step: list[int], walk: ThinkingWalk | None) -> bool:
        """Return whether drafting ends with a step; `walk` stands before it."""
        marks = self._params.end_marks
        if marks is not None:
            return any(mark in text_within(self._models.tokenizer, step) for mark in marks)
        if walk is None:
            return False
        for token in step:
            walk.feed(token)
        return walk.ended

    def _written_by(self, model: Model) -> None:
        """Count a change of writer."""
        if self._writer is not None and self._writer is not model:
            self._seq.meter.switches += 1
        self._writer = model
