"""The slot of uncertainty estimators: how much a model doubts its answer to a request.

A module here assigns its class to `PART`; requests of `abstain` and `cascade` choose it by file name.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod
from dataclasses import replace
from typing import Annotated

from pydantic import Field, FiniteFloat

from decoding.aggregators.base import AnswerSet, Candidate
from decoding.candidate_report import DOUBTS, report_candidates, report_doubt, sampled
from decoding.candidates import MARK, charge
from decoding.model import MEASURES, Model, ModelPool, ReadSpec, Request, StopCondition
from decoding.noise import derive_seed
from decoding.parts import Part
from decoding.recorder import watched
from decoding.sequence import Sequence
from turnout.candidate_sets import Doubt, Outcome
from turnout.errors import Interrupted
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams

PACKAGE = "decoding.uncertainty"
FIELD = "method.params.uncertainty"
# Seeds of samples are derived from the request's with indices from here on: no answer of a request has one.
FIRST_SAMPLE = 1 << 16

log = logging.getLogger(__name__)

UncertaintyChoice = Annotated[PartChoice, Field(json_schema_extra={"x-slot": "uncertainty"})]


class SampledParams(MethodParams):
    """Parameters of estimators that sample."""

    samples: Annotated[int, Field(ge=2, le=64, description="answers drawn for the estimate, which are not shown")] = 10
    temperature: Annotated[
        FiniteFloat | None,
        Field(gt=0.0, le=2.0, description="they are drawn at; absent: the request's, 1 where that is 0"),
    ] = None
    longest: Annotated[int | None, Field(ge=1, le=1_000_000, description="tokens of one; absent: as of the answer")] = (
        None
    )
    mark: Annotated[
        str, Field(max_length=64, description="the final answer is the line after the last of this, else the last line")
    ] = MARK


class Uncertainty(Part):
    """Estimator: the greater its value, the more doubt.

    Attributes:
        reads_answer: whether it needs the answer itself, and so can only say something once that is written.
        unit: of its values.
        meaning: what a value is, in a sentence.
    """

    where = FIELD
    reads_answer: bool = False
    unit: str = ""
    meaning: str = ""

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The least and the greatest value there can be; None: not known."""
        return None, None

    async def samples(self, seq: Sequence, model: Model, models: ModelPool) -> list[Candidate]:
        """Draw the answers that it looks at; their work is added to the request's, their tokens as discarded."""
        return []

    @abstractmethod
    async def measure(self, group: AnswerSet, answer: Candidate | None) -> float:
        """Estimate the doubt.

        Args:
            group: the samples, and the request's sequence, which ends where answers begin.
            answer: the one that is shown, if it is written.
        """


class SampledUncertainty(Uncertainty):
    """Estimator that compares answers drawn independently."""

    Params = SampledParams
    params: SampledParams

    async def samples(self, seq: Sequence, model: Model, models: ModelPool) -> list[Candidate]:
        """See `Uncertainty.samples`: all are written at once, after a prompt that is computed once."""
        params = self.params
        await model.extend(seq, want=ReadSpec(draw=None))
        forks = [model.fork(seq, derive_seed(seq.seed, FIRST_SAMPLE + index)) for index in range(params.samples)]
        temperature, start = params.temperature or seq.sampling.temperature or 1.0, len(seq.generated)
        for fork in forks:
            fork.sampling = fork.sampling.model_copy(update={"temperature": temperature})
        until = watched() | StopCondition(max_tokens=params.longest)
        tasks = [asyncio.ensure_future(model.decode(fork, until)) for fork in forks]
        try:
            await asyncio.gather(*tasks)
            return [Candidate.of(fork, start, models, params.mark) for fork in forks]
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # it may be cancelled while others end with one that failed
                for fork in forks:
                    charge(seq, fork)
                    model.release(fork)


def make_uncertainty(choice: PartChoice, field: str = FIELD) -> Uncertainty:
    """Make the estimator that a field chose.

    Raises:
        TurnoutError: NOT_FOUND, listing what exists; INVALID_ARGUMENT, naming the parameter.
    """
    made: Uncertainty = choice.make(PACKAGE, field)
    return made


async def doubt_of(
    part: Uncertainty, request: Request, seq: Sequence, model: Model, models: ModelPool, answer: Candidate | None = None
) -> float | None:
    """Measure the doubt about a request's answer, and report it in the request's measures.

    Args:
        part: the estimator, checked.
        request: gets the value, or a note.
        seq: ends where the answer begins; gets the work.
        model: whose doubt it is.
        models: the pool.
        answer: the answer, if it is written.

    Returns:
        The value; None where the estimator fails: a note says why, and the answer stays what it is.

    Raises:
        Interrupted: a process that worked on it has ended.
    """
    try:
        drawn = await part.samples(seq, model, models)
        group = AnswerSet(drawn, seq.seed, seq, model, models, notes=request.notes)
        value = await part.measure(group, answer)
        if not math.isfinite(value):
            raise ValueError("the value is not a finite number")
    except Interrupted:  # the call is made again
        raise
    except Exception as error:
        log.warning("uncertainty %s failed", part.name, exc_info=True)
        request.notes.append(f"uncertainty {part.name!r} was not measured ({error})")
        return None
    request.extra.setdefault(MEASURES, {}).update({**group.measures, part.name: value})
    report_doubt(request, Doubt(0, part.name, value, part.unit, part.meaning, *part.bounds))
    if request.candidates and drawn:
        report_candidates(request, sampled(part, group))
    return value


def settle_doubt(request: Request, name: str, limit: float, outcome: Outcome) -> None:
    """Report what became of an answer whose doubt, where it could be measured, was compared with a limit.

    Args:
        request: has the doubt.
        name: of the estimator.
        limit: doubt above which the answer is not given.
        outcome: what became of it.
    """
    known = next((each for each in request.extra.get(DOUBTS, []) if each.part == name), None)
    if known is not None:
        report_doubt(request, replace(known, limit=limit, outcome=outcome))
