"""Several answers are drawn, the best of them is shown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from decoding.aggregators.base import (
    FIELD,
    PACKAGE,
    Aggregator,
    AggregatorChoice,
    AnswerSet,
    Candidate,
    best,
    make_aggregator,
)
from decoding.artifacts import ArtifactName
from decoding.candidate_report import chosen_from, report_candidates
from decoding.candidates import MARK, charge, show
from decoding.model import MEASURES, Model, ModelPool, ReadSpec, Request, StopCondition
from decoding.noise import derive_seed
from decoding.recorder import Watch
from decoding.sequence import Sequence
from turnout.errors import Interrupted
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import Segment

log = logging.getLogger(__name__)


class BestOfParams(MethodParams):
    """Parameters of `best_of`."""

    example: ClassVar[Mapping[str, Any]] = {"k": 3}
    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    k: Annotated[int, Field(ge=1, le=64, description="answers drawn")] = 4
    rerank: Annotated[
        AggregatorChoice,
        Field(
            description="which is shown: a name, or an object of the name and parameters, such as majority, one with"
            " the most common final answer; logprob, the likeliest; reward, the one that a reward model finds best;"
            " `turnout parts aggregators`"
        ),
    ] = PartChoice(name="majority")
    mark: Annotated[
        str,
        Field(
            max_length=64,
            description="the final answer is the line after the last of this; the last line where it is missing",
        ),
    ] = MARK
    artifact: Annotated[ArtifactName, Field(description="of a `rerank` that needs one, where it names none itself")] = (
        "reward_model"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.aggregator()
        return self

    @property
    def chosen(self) -> PartChoice:
        """`rerank`, with `artifact` where that was given."""
        choice = self.rerank
        if "artifact" not in self.model_fields_set or "artifact" in choice.params:
            return choice
        takes = "artifact" in choice.find(PACKAGE, FIELD).Params.model_fields
        return PartChoice.of(choice.name, **choice.params, artifact=self.artifact) if takes else choice

    def aggregator(self, models: ModelPool | None = None) -> Aggregator:
        """Make what chooses; with a pool, check that it can.

        Raises:
            TurnoutError: NOT_FOUND or INVALID_ARGUMENT: the pool lacks what it needs.
        """
        made = make_aggregator(self.chosen)
        if models is not None:
            made.check(models)
        return made

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        self.aggregator(models)

    @property
    def beyond_text(self) -> str:
        """See `MethodParams.beyond_text`."""
        return "" if self.aggregator().over_text else "rerank"


@method(params=BestOfParams, papers=(45,), lossless=False, needs=frozenset(), over_text=True)
async def best_of(request: Request, models: ModelPool, params: BestOfParams) -> AsyncIterator[Segment]:
    """One model draws several answers, and the one that most agree on, or another part prefers, is shown.

    Paper #45 (Learning How Hard to Think), its best-of-k; how many to draw is a parameter, which a routing policy sets.
    Each answer follows the model's law, which one is shown does not. Nothing is shown before all are written, or
    enough of them for the choice: the others are then cancelled. The prompt is computed once. With k = 1 it is plain
    decoding: the first answer is drawn with the request's own seed.
    """
    model, seq = models.by_role(params.model), request.sequence
    count = params.k
    if seq.sampling.greedy and count > 1:
        request.notes.append(f"one answer instead of {count}: at temperature 0 they would all be the same")
        count = 1
    aggregator = params.aggregator(models)
    if count > 1:  # the forks share the prompt's blocks, so that it is fed once; its last place is fed by each
        await model.extend(seq, want=ReadSpec(draw=None))
    drafts = [model.fork(seq, derive_seed(seq.seed, index)) for index in range(count)]
    held = list(drafts)
    try:
        answers = await _write(model, drafts, aggregator, models, params.mark)
        left = [draft for place, draft in enumerate(drafts) if place not in answers]
        start = len(seq.generated)
        cancelled = [Candidate.of(draft, start, models, params.mark) for draft in left if request.candidates]
        for draft in left:
            _discard(seq, draft, model, held)
        places = list(answers)
        group = AnswerSet(list(answers.values()), seq.seed, seq, model, models, notes=request.notes)
        best_place = await choose(aggregator, group)
        chosen = drafts[places[best_place]]
        if request.candidates:
            report_candidates(request, chosen_from(aggregator, group, best_place, cancelled))
        if group.measures:
            request.extra.setdefault(MEASURES, {}).update(group.measures)
        for draft in list(held):
            if draft is not chosen:
                _discard(seq, draft, model, held)
        segment = show(seq, chosen, models)
    finally:
        for draft in held:
            model.release(draft)
    yield segment


async def _write(
    model: Model, drafts: list[Sequence], aggregator: Aggregator, models: ModelPool, mark: str
) -> dict[int, Candidate]:
    """Write all answers at once, until all have ended, or the aggregator needs no more; the first that fails ends all.

    Returns:
        The answers that have ended, by place, in their order.
    """
    start, rules = len(drafts[0].generated), [aggregator.rule() for _ in drafts]
    tasks = [
        asyncio.ensure_future(model.decode(draft, StopCondition((Watch(),) if rule is None else (Watch(), rule))))
        for draft, rule in zip(drafts, rules, strict=True)
    ]
    when = asyncio.FIRST_COMPLETED if aggregator.stops_early else asyncio.FIRST_EXCEPTION
    pending = set(tasks)
    answers: dict[int, Candidate] = {}
    try:
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=when)
            for task in ended:
                task.result()
                place = tasks.index(task)
                answers[place] = Candidate.of(drafts[place], start, models, mark, rules[place])
            if pending and aggregator.stops_early and aggregator.decided(list(answers.values()), len(pending)):
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # Another process counts what a cancelled call has written once that has ended there, which the next one waits for.
    left = [draft for place, draft in enumerate(drafts) if place not in answers]
    await asyncio.gather(*(model.decode(draft, StopCondition(max_tokens=0)) for draft in left))
    return dict(sorted(answers.items()))


def _discard(seq: Sequence, draft: Sequence, model: Model, held: list[Sequence]) -> None:
    """Count a fork's tokens as discarded, and free its memory."""
    charge(seq, draft)
    model.release(draft)
    held.remove(draft)


async def choose(aggregator: Aggregator, group: AnswerSet) -> int:
    """Return the place of the answer to show; the likeliest, with a note, where the aggregator fails.

    Raises:
        Interrupted: a process that worked on it has ended.
    """
    if len(group.answers) == 1:
        return 0
    try:
        return await aggregator.choose(group)
    except Interrupted:  # the call is made again
        raise
    except Exception as error:
        log.warning("aggregator %s failed", aggregator.name, exc_info=True)
        group.scores = group.votes = None
        group.notes.append(f"rerank {aggregator.name!r} failed ({error}); the likeliest answer is shown")
        return best(group.likelihoods)
