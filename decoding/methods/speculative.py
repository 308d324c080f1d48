"""Speculative decoding: any drafter, length policy and verifier that fit each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.drafters.base import Candidates, Drafter
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.lengths.base import LengthPolicy
from decoding.model import ModelPool, Request
from decoding.parts import PartChoice
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.selectors.base import Selector
from decoding.speculation import Arm, Speculation
from decoding.stretch import stream
from decoding.verifiers.base import PACKAGE as VERIFIERS
from decoding.verifiers.base import Verifier
from turnout.errors import TurnoutError, invalid
from turnout.registry import MethodParams, method
from turnout.types import Segment

FIELD = "method.params"
MOST_NODES = 512


class ArmParams(MethodParams):
    """One drafter, with its own length policy if it has one."""

    drafter: PartChoice
    length: PartChoice | None = None
    nodes: Annotated[int | None, Field(ge=1, le=MOST_NODES)] = None


class SpeculativeParams(MethodParams):
    """Parameters of `speculative`. A part is a name, or an object of its name and parameters."""

    drafter: Annotated[
        PartChoice | tuple[ArmParams, ...],
        Field(description="who proposes tokens; or a list of {drafter, length, nodes} for `select` to choose from"),
    ] = PartChoice(name="model_chain")
    length: Annotated[PartChoice, Field(description="how deep a draft goes")] = PartChoice(name="fixed")
    draft_length: Annotated[
        int | None, Field(ge=1, le=64, description="deepest draft, whatever the length policy says; absent: its own")
    ] = None
    nodes: Annotated[
        int | None, Field(ge=1, le=MOST_NODES, description="most tokens of a draft tree; absent: the drafter's own")
    ] = None
    verifier: Annotated[
        PartChoice,
        Field(
            description="match: output equals plain decoding with the same seed; rejection: same distribution, and the"
            " most accepted tokens for a draft drawn independently; others: `turnout parts verifiers`"
        ),
    ] = PartChoice(name="match")
    select: Annotated[PartChoice, Field(description="which of several drafters drafts a round")] = PartChoice(
        name="first"
    )
    fallback: Annotated[
        Literal["refuse", "plain"],
        Field(description="where the parts do not fit each other or the models: refuse, or decode plainly"),
    ] = "refuse"

    @field_validator("drafter", mode="before")
    @classmethod
    def _names_in_lists(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return tuple(
            each if (isinstance(each, dict) and "drafter" in each) or isinstance(each, ArmParams) else {"drafter": each}
            for each in value
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.arms:
            raise invalid(f"{FIELD}.drafter", "is empty; at least one drafter is needed")
        try:
            make_parts(self)
        except TurnoutError:
            if self.fallback == "refuse":
                raise
        return self

    @property
    def arms(self) -> tuple[ArmParams, ...]:
        """Every drafter with what it was given."""
        return (ArmParams(drafter=self.drafter),) if isinstance(self.drafter, PartChoice) else self.drafter

    @property
    def lossless(self) -> bool:
        """Whether the output law is the large model's: the verifier decides."""
        part = self.verifier.find(VERIFIERS, f"{FIELD}.verifier")
        return issubclass(part, Verifier) and part.lossless


def make_parts(params: SpeculativeParams) -> tuple[list[Arm], Selector, Verifier]:
    """The parts a request chose, made for it.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT: an unknown part, a wrong parameter, parts that do not fit.
    """
    verifier: Verifier = params.verifier.make(VERIFIERS, f"{FIELD}.verifier")
    selector: Selector = params.select.make(SELECTORS, f"{FIELD}.select")
    arms = []
    for place, arm in enumerate(params.arms):
        where = f"{FIELD}.drafter" if isinstance(params.drafter, PartChoice) else f"{FIELD}.drafter.{place}"
        part = arm.drafter.find(DRAFTERS, where)
        assert issubclass(part, Drafter)
        length = _length(arm.length or params.length, params.draft_length, part.depth)
        kind = _kind(part, verifier, length)
        arms.append(Arm(part(arm.drafter.parse(part, where), kind), length, arm.nodes or params.nodes))
    return arms, selector, verifier


def _length(choice: PartChoice, asked: int | None, natural: int | None) -> LengthPolicy:
    """The policy, limited by what the request says, else by the policy's own parameters, else by the drafter."""
    given = choice.params
    if asked is not None:
        given = {**given, "most": asked}
    elif natural is not None:
        given = {"most": natural, **given}
    length: LengthPolicy = PartChoice.of(choice.name, **given).make(LENGTHS, f"{FIELD}.length")
    return length


def _kind(part: type[Drafter], verifier: Verifier, length: LengthPolicy) -> Candidates:
    """Which of its candidates a drafter is to make; refused where the parts do not fit."""
    kind = next((kind for kind in verifier.accepts if kind in part.kinds), None)
    if kind is None:
        raise invalid(
            f"{FIELD}.verifier",
            f"{verifier.name!r} judges {_listed(verifier.accepts)} drafts, {part.name!r} makes {_listed(part.kinds)}",
        )
    if length.stepwise and not part.stepwise:
        raise invalid(
            f"{FIELD}.length", f"{length.name!r} looks at each drafted token; {part.name!r} drafts them at once"
        )
    return kind


def _listed(kinds: tuple[Candidates, ...] | frozenset[Candidates]) -> str:
    return " or ".join(sorted(kinds))


@method(params=SpeculativeParams, seeds=(111,), lossless=True, needs=frozenset({"small", "large"}))
async def speculative(request: Request, models: ModelPool, params: SpeculativeParams) -> AsyncIterator[Segment]:
    """Tokens are drafted, the large model verifies them in one forward; the output law is the large model's.

    Seed 111 (Speculative decoding), with the drafters, length policies, verifiers and selectors of the papers they
    name. A verifier that is not lossless says which law it has. An end of the answer inside a draft cuts the rest of
    the round.
    """
    try:
        arms, selector, verifier = make_parts(params)
        for arm in arms:
            arm.drafter.check(models)
            arm.length.check(models)
    except TurnoutError as error:
        if params.fallback == "refuse":
            raise
        request.notes.append(f"decoded plainly: {error}")
        segments = stream(models.large, request.sequence)
    else:
        segments = Speculation(request, models, arms, selector, verifier).run()
    async with aclosing(segments) as running:  # type: ignore[type-var]
        async for segment in running:
            yield segment
