"""Speculative decoding: any drafter, length policy and verifier that fit each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from decoding.calibration import RAN
from decoding.decode_loop import stream
from decoding.drafters._none import NoDrafter
from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.lengths.base import LengthPolicy
from decoding.lengths.fixed import FixedLength
from decoding.model import ModelPool, Request
from decoding.parts import PartChoice
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.selectors.base import Selector
from decoding.speculation import Arm, Speculation
from decoding.verifiers.base import PACKAGE as VERIFIERS
from decoding.verifiers.base import Verifier
from turnout.errors import TurnoutError, invalid
from turnout.registry import MethodParams, explain, load, method, names
from turnout.types import Segment

Form = TypeVar("Form", bound=BaseModel)

FIELD = "method.params"
MOST_NODES = 512
MOST_ARMS = 16
# Parameters that a plain answer has none of.
PARTS = ("drafter", "draft_length", "nodes", "length", "verifier", "select")
NONE = PartChoice(name="none")


@dataclass(frozen=True, slots=True)
class Places:
    """Fields of a request that give an arm's drafter, its length policy and its nodes: its own, or all arms'."""

    drafter: str = f"{FIELD}.drafter"
    length: str = f"{FIELD}.length"
    nodes: str = f"{FIELD}.nodes"


class ArmParams(MethodParams):
    """One drafter, with its own length policy if it has one; "none" decodes plainly where its turn comes."""

    drafter: PartChoice
    length: PartChoice | None = None
    nodes: Annotated[int | None, Field(ge=1, le=MOST_NODES)] = None
    _bare: bool = PrivateAttr(False)

    @classmethod
    def read(cls, value: Any, where: str) -> ArmParams:
        """Read an entry of a list of drafters: all of these, or a drafter alone.

        Raises:
            TurnoutError: INVALID_ARGUMENT, naming a field that the request has, or could have.
        """
        # An arm has no name; some drafters have a drafter inside, as arms have.
        if isinstance(value, ArmParams) or (isinstance(value, dict) and "name" not in value):
            return parsed(cls, value, where)
        arm = cls(drafter=parsed(PartChoice, value, where))
        arm._bare = True
        return arm

    def places(self, own: str) -> Places:
        """Where the request says what of an arm that stands there in its list."""
        return Places(
            own if self._bare else f"{own}.drafter",
            f"{own if self.length else FIELD}.length",
            f"{own if self.nodes else FIELD}.nodes",
        )


class SpeculativeParams(MethodParams):
    """Parameters of `speculative`. A part is a name, or an object of its name and parameters."""

    drafter: Annotated[
        PartChoice | tuple[ArmParams, ...],
        Field(
            description=f"who proposes tokens; or at most {MOST_ARMS} of {{drafter, length, nodes}} in a list, for"
            ' `select` to choose from, in which "none" stands for plain decoding',
            json_schema_extra={"x-slot": "drafters"},
        ),
    ] = PartChoice(name="model_chain")
    length: Annotated[
        PartChoice, Field(description="how deep a draft goes", json_schema_extra={"x-slot": "lengths"})
    ] = PartChoice(name="fixed")
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
            " most accepted tokens for a draft drawn independently; others: `turnout parts verifiers`",
            json_schema_extra={"x-slot": "verifiers"},
        ),
    ] = PartChoice(name="match")
    select: Annotated[
        PartChoice,
        Field(description="which of several drafters drafts a round", json_schema_extra={"x-slot": "selectors"}),
    ] = PartChoice(name="first")
    fallback: Annotated[
        Literal["refuse", "plain"],
        Field(
            description="where these parameters are wrong, or do not fit each other or the models: refuse, or decode"
            " plainly"
        ),
    ] = "refuse"
    _refused: str = PrivateAttr("")

    @field_validator("drafter", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        """Read here, so that a refusal names the field and not which form pydantic tried."""
        if not isinstance(value, list | tuple):
            return parsed(PartChoice, value, f"{FIELD}.drafter")
        if len(value) > MOST_ARMS:
            raise invalid(f"{FIELD}.drafter", f"has {len(value)} drafters; at most {MOST_ARMS} are allowed")
        return tuple(ArmParams.read(each, f"{FIELD}.drafter.{place}") for place, each in enumerate(value))

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Self:
        falls_back = isinstance(value, dict) and value.get("fallback") == "plain"
        try:
            params: Self = validate(value)
        except (ValidationError, TurnoutError) as error:
            if not falls_back:
                raise
            params = validate({"fallback": "plain"})
            refusal = error if isinstance(error, TurnoutError) else explain(error, FIELD, cls)
            params.fall_back(refusal)
            return params
        try:
            make_parts(params)
        except TurnoutError as error:
            if not falls_back:
                raise
            params.fall_back(error)
        return params

    def fall_back(self, refusal: TurnoutError) -> None:
        """Take down why the request is decoded plainly."""
        self._refused = refusal.message

    @property
    def refused(self) -> str:
        """Why the request is decoded plainly; empty where nothing is known against its parameters."""
        return self._refused

    def check_parts(self, models: ModelPool) -> None:
        """See `MethodParams.check_parts`; what falls back to plain decoding does without."""
        if self.fallback == "refuse":
            checked_parts(self, models)

    @property
    def arms(self) -> tuple[ArmParams, ...]:
        """Every drafter with what it was given."""
        return (ArmParams(drafter=self.drafter),) if isinstance(self.drafter, PartChoice) else self.drafter

    @property
    def lossless(self) -> bool:
        """True if the output law is the large model's: the verifier decides, unless there is nothing to verify."""
        if self._refused:
            return True
        part = self.verifier.find(VERIFIERS, f"{FIELD}.verifier")
        return issubclass(part, Verifier) and part.lossless

    @property
    def resumable(self) -> bool:
        """True if each token depends on those before it and the seed alone, and not on who drafted what when."""
        part = self.verifier.find(VERIFIERS, f"{FIELD}.verifier")
        return bool(self._refused) or (issubclass(part, Verifier) and part.resumable)


def parsed(form: type[Form], value: Any, where: str) -> Form:
    """A value of a parameter, read.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field and what is allowed.
    """
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise explain(error, where, form) from None


def make_parts(params: SpeculativeParams) -> tuple[list[Arm], Selector, Verifier]:
    """The parts a request chose, made for it.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT: an unknown part, a wrong parameter, parts that do not fit.
    """
    if not params.arms:
        raise invalid(f"{FIELD}.drafter", "is empty; at least one drafter is needed")
    verifier: Verifier = params.verifier.make(VERIFIERS, f"{FIELD}.verifier")
    selector: Selector = params.select.make(SELECTORS, f"{FIELD}.select")
    arms = []
    for place, arm in enumerate(params.arms):
        if arm.drafter == NONE:
            arms.append(Arm(NoDrafter(), FixedLength()))
            continue
        alone = isinstance(params.drafter, PartChoice)
        places = Places() if alone else arm.places(f"{FIELD}.drafter.{place}")
        part = arm.drafter.find(DRAFTERS, places.drafter)
        assert issubclass(part, Drafter)
        given = arm.drafter.parse(part, places.drafter)
        inside = part.inside(given, places.drafter)
        length = _length(arm.length or params.length, params.draft_length, inside.depth, places.length)
        kind = _kind(inside, verifier, length)
        drafter, nodes = part(given, kind), arm.nodes or params.nodes or inside.nodes
        drafter.where = places.drafter
        depth = length.params.most
        drafter.check_room(DraftBudget(depth, nodes or depth), places.nodes)
        arms.append(Arm(drafter, length, nodes))
    return arms, selector, verifier


def checked_parts(params: SpeculativeParams, models: ModelPool) -> tuple[list[Arm], Selector, Verifier]:
    """The parts a request chose, after a look at the models.

    Raises:
        TurnoutError: as `make_parts`; also what a part refuses, say an artifact of another model.
    """
    arms, selector, verifier = make_parts(params)
    for arm in arms:
        _check_vocabulary(arm.drafter, models)
        arm.drafter.check(models)
        arm.length.check(models)
        arm.length.check_draft(models.by_role("small" if arm.drafter.runs_on == "small" else "large"))
    verifier.check(models)
    return arms, selector, verifier


def _check_vocabulary(drafter: Drafter, models: ModelPool) -> None:
    """Refuse a drafter that takes the small model's tokens for the target's where they are not.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the drafters that can.
    """
    if drafter.runs_on != "small" or drafter.across_vocabularies or not models.vocabularies.differs(models.small.name):
        return
    able = [name for name in names(DRAFTERS) if load(DRAFTERS, name, "").PART.across_vocabularies]
    free = "or one that needs no small model"
    raise invalid(
        drafter.where,
        f"{drafter.name!r} needs one vocabulary, and that of {models.small.name!r} is not that of"
        f" {models.large.name!r}; use {', '.join(able)}, {free}",
    )


def _length(choice: PartChoice, asked: int | None, natural: int | None, where: str) -> LengthPolicy:
    """The policy, limited by what the request says, else by the policy's own parameters, else by the drafter."""
    given = choice.params
    if asked is not None:
        given = {**given, "most": asked}
    elif natural is not None:
        given = {"most": natural, **given}
    length: LengthPolicy = PartChoice.of(choice.name, **given).make(LENGTHS, where)
    return length


def _kind(part: type[Drafter], verifier: Verifier, length: LengthPolicy) -> Candidates:
    """Choose the kind of candidates that a drafter makes; refuse parts that do not fit."""
    kind = next((kind for kind in verifier.accepts if kind in part.kinds), None)
    if kind is None:
        fitting = [name for name in names(VERIFIERS) if part.kinds & set(load(VERIFIERS, name, "").PART.accepts)]
        raise invalid(
            f"{FIELD}.verifier",
            f"{verifier.name!r} judges {_listed(verifier.accepts)} drafts, {part.name!r} makes {_listed(part.kinds)};"
            f" {part.name!r} goes with {', '.join(fitting)}",
        )
    if length.stepwise and not part.stepwise:
        fitting = [name for name in names(LENGTHS) if not load(LENGTHS, name, "").PART.stepwise]
        raise invalid(
            length.where,
            f"{length.name!r} looks at each drafted token; {part.name!r} drafts them at once, and goes with"
            f" {', '.join(fitting)}",
        )
    return kind


def _listed(kinds: tuple[Candidates, ...] | frozenset[Candidates]) -> str:
    return " or ".join(sorted(kinds))


@method(
    params=SpeculativeParams,
    papers=(111,),
    lossless=True,
    needs=frozenset({"small", "large"}),
    resumable=True,
    across_vocabularies=True,
)
async def speculative(request: Request, models: ModelPool, params: SpeculativeParams) -> AsyncIterator[Segment]:
    """Tokens are drafted, the large model verifies them in one forward; the output law is the large model's.

    Paper #111 (Speculative decoding), with the drafters, length policies, verifiers and selectors of the papers they
    name. A verifier that is not lossless says which law it has. An end of the answer inside a draft cuts the rest of
    the round.
    """
    if not params.refused:
        try:
            speculation = Speculation(request, models, *checked_parts(params, models))
        except TurnoutError as error:
            if params.fallback == "refuse":
                raise
            params.fall_back(error)
    if params.refused:
        request.notes.append(f"decoded plainly: {params.refused}")
        request.extra[RAN] = dict.fromkeys(PARTS)  # no part of it ran, neither what was asked for nor the usual ones
    segments = stream(models.large, request.sequence) if params.refused else speculation.run()
    async with aclosing(segments) as running:  # type: ignore[type-var]
        async for segment in running:
            yield segment
