"""Any method answers; where the model doubts its answer, it says so instead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, FiniteFloat, model_validator

from decoding.aggregators.base import Candidate
from decoding.calibrated_params import check_method
from decoding.candidates import MARK, charge, show
from decoding.model import MEASURES, Model, ModelPool, Request
from decoding.sequence import Sequence
from decoding.text import codec_of, continuation_ids
from decoding.uncertainty.base import Uncertainty, UncertaintyChoice, doubt_of, make_uncertainty, settle_doubt
from turnout.errors import FieldError, invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, ModelRole, get_method, method
from turnout.types import FinishReason, Segment, Token

FIELD = "method.params"
SOURCE = "abstained"  # no model wrote the text


class AbstainParams(MethodParams):
    """Parameters of `abstain`. Method and estimator are a name, or an object of the name and parameters."""

    example: ClassVar[Mapping[str, Any]] = {"uncertainty": {"name": "snne", "samples": 3}}
    inner: Annotated[
        PartChoice, Field(description="the method that writes", json_schema_extra={"x-slot": "methods"})
    ] = PartChoice(name="plain")
    uncertainty: Annotated[
        UncertaintyChoice, Field(description="what measures the doubt; `turnout parts uncertainty`")
    ] = PartChoice(name="semantic_entropy")
    model: Annotated[ModelRole, Field(description="role of the model whose doubt it is")] = "large"
    abstain_above: Annotated[
        FiniteFloat | None,
        Field(ge=-1e6, le=1e6, description="doubt above which no answer is given; absent: it is only reported"),
    ] = None
    text: Annotated[str, Field(max_length=2000, description="what is said instead; empty: nothing")] = "I am not sure."

    @model_validator(mode="after")
    def _check(self) -> Self:
        info = get_method(self.inner.name, f"{FIELD}.inner")
        info.parse(self.inner.params, f"{FIELD}.inner")
        if info.joint:
            raise FieldError("inner", f"{info.name!r} writes all answers of a request together")
        make_uncertainty(self.uncertainty)
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Roles that the inner method needs."""
        return get_method(self.inner.name, f"{FIELD}.inner").needs

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`."""
        inner = get_method(self.inner.name, f"{FIELD}.inner")
        check_method(models, inner.name, inner.parse(self.inner.params, f"{FIELD}.inner"), f"{FIELD}.inner")
        make_uncertainty(self.uncertainty).check(models)


@method(params=AbstainParams, papers=(113,), lossless=False, needs=frozenset())
async def abstain(request: Request, models: ModelPool, params: AbstainParams) -> AsyncIterator[Segment]:
    """Any method answers, unless a model's doubt is too high: then a fixed text stands in place of the answer.

    The doubt is in the answer's usage (`measures`), with or without a limit. An estimator that looks at samples or at
    the prompt decides before the answer is begun, which then streams; one that reads the answer holds it until it is
    decided. If it fails, the answer is given, with a note. Answers that are given follow the inner method's law, given
    that they are.
    """
    inner, model = get_method(params.inner.name, f"{FIELD}.inner"), models.by_role(params.model)
    seq, part = request.sequence, make_uncertainty(params.uncertainty)
    part.check(models)
    words = _words(request, models, params)
    if part.reads_answer:
        yield await _held(request, models, params, part, model, words)
        return
    found = await doubt_of(part, request, seq, model, models)
    if _too_high(request, params, found):
        yield _abstained(request, words)
        return
    parsed = inner.parse(params.inner.params, f"{FIELD}.inner")
    async with aclosing(inner.run(request, models, parsed)) as segments:  # type: ignore[type-var]
        async for segment in segments:
            yield segment


async def _held(
    request: Request, models: ModelPool, params: AbstainParams, part: Uncertainty, model: Model, words: tuple[int, ...]
) -> Segment:
    """The inner method's whole answer, or the text in its place."""
    inner, seq = get_method(params.inner.name, f"{FIELD}.inner"), request.sequence
    draft = model.fork(seq)
    within = replace(request, sequence=draft, answers=(draft,), streams=False)
    parsed = inner.parse(params.inner.params, f"{FIELD}.inner")
    try:
        async with aclosing(inner.run(within, models, parsed)) as segments:  # type: ignore[type-var]
            async for _ in segments:
                pass
        answer = Candidate.of(draft, len(seq.generated), models, MARK)
        found = await doubt_of(part, request, seq, model, models, answer)
        if _too_high(request, params, found):
            charge(seq, draft)
            return _abstained(request, words)
        return show(seq, draft, models)
    finally:
        for each in models.models.values():
            each.release(draft)


def _words(request: Request, models: ModelPool, params: AbstainParams) -> tuple[int, ...]:
    """Tokens of the text, which is no thinking even if the prompt begins some; a structure is refused.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the request has a structure, or the tokenizer makes no tokens of text.
    """
    if params.abstain_above is None or not params.text:
        return ()
    if request.sequence.sampling.structure is not None:
        raise invalid(f"{FIELD}.text", "must be empty where the answer has a structure, which it would not fit")
    words, thinking = continuation_ids(codec_of(models, f"{FIELD}.text"), params.text), request.sequence.thinking
    if thinking is None:
        return words
    ends = (*thinking.end.ids, *thinking.gap) if thinking.start == "inside" else ()
    return (*(thinking.direct or ends), *words)


def _too_high(request: Request, params: AbstainParams, doubt: float | None) -> bool:
    """Whether no answer is given; the measures, the doubt's outcome and a note say so."""
    name, limit = params.uncertainty.name, params.abstain_above
    if limit is None or doubt is None:
        return False
    above = doubt > limit
    request.extra.setdefault(MEASURES, {})["abstained"] = float(above)
    settle_doubt(request, name, limit, "abstained" if above else "kept")
    if above:
        request.notes.append(f"abstained: {name} is {doubt:.4g}, above abstain_above ({limit:g})")
    return above


def _abstained(request: Request, words: tuple[int, ...]) -> Segment:
    seq: Sequence = request.sequence
    tokens = seq.extend((Token(token, SOURCE) for token in words), {SOURCE: 0})
    if not seq.finished:
        seq.finish_reason = FinishReason.STOP
    return Segment(tokens, SOURCE)
