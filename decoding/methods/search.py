"""One model searches for its likeliest answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from decoding.candidate_report import report_candidates
from decoding.model import Model, ModelPool, Request
from decoding.search._report import found_by
from decoding.search.base import PACKAGE, Hypothesis, Search, SearchTask
from decoding.search_kernel import SearchKernel, count_discarded
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, ModelRole, method
from turnout.types import MOST_WIDTH, Segment, Token

FIELD = "method.params"
WIDTH = 4  # where the request says nothing
KEPT = 4  # sequences kept for each hypothesis of the width


class SearchParams(MethodParams):
    """Parameters of `search`. The search is a name, or an object of its name and parameters."""

    model: Annotated[ModelRole, Field(description="role of the model that answers")] = "large"
    search: Annotated[
        PartChoice,
        Field(
            description="which hypotheses are followed, and which answer; `turnout parts search`",
            json_schema_extra={"x-slot": "search"},
        ),
    ] = PartChoice(name="beam")
    width: Annotated[
        int | None,
        Field(ge=1, le=MOST_WIDTH, description=f"hypotheses followed at once, at least n; absent: {WIDTH}, or n"),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.search.find(PACKAGE, f"{FIELD}.search")
        return self

    def made(self) -> Search:
        """Return the search, made for one request."""
        made: Search = self.search.make(PACKAGE, f"{FIELD}.search")
        return made

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        self.made().check(models)


@method(
    params=SearchParams,
    papers=(),
    lossless=False,
    needs=frozenset(),
    joint=True,
    across_vocabularies=True,
    contrasts=True,
)
async def search(request: Request, models: ModelPool, params: SearchParams) -> AsyncIterator[Segment]:
    """One model searches for its likeliest answers; the n best are the n answers of the request.

    Which hypotheses are followed is decided by the part `search`. Scores come from the distribution that tokens would
    be drawn from, so that penalties, processors and structures hold; at temperature 0 it is that of temperature 1, not
    truncated. Nothing is drawn, and the seed does not matter. All hypotheses share the blocks of what they have in
    common, and are read in one batch. Nothing is shown before the search is over.
    """
    model, answers = models.by_role(params.model), request.answers
    prompt, part = answers[0], params.made()
    width = params.width or max(WIDTH, len(answers))
    if width < len(answers):
        raise invalid(f"{FIELD}.width", f"{width}, but n is {len(answers)}: at least n are needed")
    is_free = prompt.constraint is None and not prompt.sampling.bans_tokens
    bounds = width, len(answers), prompt.num_remaining, prompt.end_ids, model.vocab_size
    task = SearchTask(*bounds, model, prompt, is_free)
    kernel = SearchKernel(model, part, prompt, part.begin(task, models), KEPT * width, f"{FIELD}.width")
    try:
        found = await kernel.run()
    finally:
        kernel.close()
    shown = _shown(found, len(answers), request)
    count_discarded(prompt, model, kernel.num_written, shown)
    if (report := part.report()) is not None:
        request.extra[part.name] = report
        counts = [f"{name} {value}" for name, value in report.items() if not isinstance(value, list)]
        request.notes.append(f"{part.name}: {', '.join(counts)}")
    if request.candidates:
        places = {place: range(place, len(shown), len(found)) for place in range(min(len(found), len(shown)))}
        tokens = models.tokenizer
        found_set = await asyncio.to_thread(found_by, part, found, places, len(answers), tokens)
        report_candidates(request, found_set)
    for index, each in enumerate(shown):
        yield Segment(answers[index].extend(_tokens(each, model), models.sizes), "finish", index)


def _shown(found: list[Hypothesis], count: int, request: Request) -> list[Hypothesis]:
    """The best hypotheses, one for each answer; where there are fewer, the first ones again."""
    if not found:
        request.notes.append("search: no answer fits")
        return []
    if len(found) < count:
        request.notes.append(f"search: only {len(found)} different answers; they repeat")
    return [found[place % len(found)] for place in range(count)]


def _tokens(each: Hypothesis, model: Model) -> list[Token]:
    return [node.details or Token(node.token, model.name) for node in each.path]
