"""Speculative decoding: any drafter, length policy and verifier that fit each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from decoding.automatic import Roster, offered
from decoding.calibration import RAN
from decoding.decode_loop import stream
from decoding.drafters._none import NoDrafter
from decoding.drafters.base import PACKAGE as DRAFTERS
from decoding.drafters.base import Candidates, DraftBudget, Drafter
from decoding.lengths.base import PACKAGE as LENGTHS
from decoding.lengths.base import LengthPolicy
from decoding.lengths.fixed import FixedLength
from decoding.methods._arms import FIELD, MOST_ARMS, MOST_NODES, ArmParams, Places, Rounds, parsed, rounds_of
from decoding.model import ModelPool, Request
from decoding.selectors.base import PACKAGE as SELECTORS
from decoding.selectors.base import Selector
from decoding.speculation import Arm, Speculation
from decoding.verifiers.base import PACKAGE as VERIFIERS
from decoding.verifiers.base import Verifier
from turnout.errors import TurnoutError, invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, explain, load, method, names
from turnout.types import Segment

# Parameters that a plain answer has none of.
PARTS = ("drafter", "draft_length", "nodes", "length", "verifier", "select")
NONE = PartChoice(name="none")
# What is used where a request names nothing: by measured times, where these cannot change an answer, and otherwise.
TIMED, UNTIMED = PartChoice(name="smartspec"), PartChoice(name="fixed")
CHAIN = PartChoice(name="model_chain")
FIRST, MOST_GOODPUT = PartChoice(name="first"), PartChoice(name="goodput")


class SpeculativeParams(MethodParams):
    """Parameters of `speculative`. A part is a name, or an object of its name and parameters."""

    drafter: Annotated[
        PartChoice | tuple[ArmParams, ...] | None,
        Field(
            description=f"who proposes tokens; or at most {MOST_ARMS} of {{drafter, length, nodes}} in a list, for"
            ' `select` to choose from, in which "none" stands for plain decoding; absent: chosen among copies, the'
            " small model and trained heads, by measured times, or `model_chain` where a length is named or times could"
            " change the answer",
            json_schema_extra={"x-slot": "drafters"},
        ),
    ] = None
    length: Annotated[
        PartChoice | None,
        Field(
            description="how deep a draft goes; absent: `smartspec`, or `fixed` where measured times could change the"
            " answer (tokens drawn under a verifier other than match)",
            json_schema_extra={"x-slot": "lengths"},
        ),
    ] = None
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
        PartChoice | None,
        Field(
            description="which of several drafters drafts a round; absent: `first`, or `goodput` where `drafter` is"
            " absent, too",
            json_schema_extra={"x-slot": "selectors"},
        ),
    ] = None
    rounds: Annotated[
        dict[str, Rounds] | None,
        Field(
            description="drafter and depth of every round, by the answer's seed, as the usage of an answer reports them"
            " that measured times could have changed: that answer is repeated"
        ),
    ] = None
    fallback: Annotated[
        Literal["refuse", "plain"],
        Field(
            description="where these parameters are wrong, or do not fit each other or the models: refuse, or decode"
            " plainly"
        ),
    ] = "refuse"
    _refused: str = PrivateAttr("")
    _untimed: bool = PrivateAttr(False)

    @field_validator("drafter", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        """Read here, so that a refusal names the field and not which form pydantic tried."""
        if value is None:
            return None
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
            checked_parts(self.chosen(models), models)

    def untimed(self) -> Self:
        """See `MethodParams.untimed`: times change no token, but which of them come together."""
        params = self.model_copy()
        params._untimed = True
        return params

    def chosen(self, models: ModelPool | None = None, greedy: bool = False) -> Self:
        """Return the parameters with values for what they leave open.

        Args:
            models: the pool; None: not known yet.
            greedy: whether no token of the answer is drawn.
        """
        timed = self.is_timed(greedy)
        left: dict[str, Any] = {"length": self.length or (TIMED if timed else UNTIMED), "select": self.select or FIRST}
        if self.drafter is None:
            left |= {"drafter": CHAIN}
        if self.is_automatic(greedy):
            kinds = set(self._verifier.accepts)
            found = [each for each in offered(models) if kinds & _drafter(each).kinds]
            if len(found) == 1:
                left |= {"drafter": found[0]}
            elif found:
                left |= {"drafter": tuple(ArmParams(drafter=each) for each in found)}
                left |= {"select": self.select or MOST_GOODPUT}
        return self.model_copy(update=left)

    def is_timed(self, greedy: bool) -> bool:
        """Return whether a choice by measured times leaves every token what it is, so that it is made unasked.

        Args:
            greedy: whether no token of the answer is drawn.
        """
        return not self._untimed and (self.resumable or (greedy and self.lossless))

    def is_automatic(self, greedy: bool) -> bool:
        """Return whether the drafters are chosen as well: nothing is said of them, nor of their drafts' sizes."""
        silent = self.drafter is None and self.length is None and self.draft_length is None and self.nodes is None
        return silent and self.is_timed(greedy)

    @property
    def arms(self) -> tuple[ArmParams, ...]:
        """Every drafter with what it was given."""
        if self.drafter is None:
            return ()
        return (ArmParams(drafter=self.drafter),) if isinstance(self.drafter, PartChoice) else self.drafter

    @property
    def lossless(self) -> bool:
        """True if the output law is the large model's: the verifier decides, unless there is nothing to verify."""
        if self._refused:
            return True
        return self._verifier.lossless

    @property
    def resumable(self) -> bool:
        """True if each token depends on those before it and the seed alone, and not on who drafted what when."""
        return bool(self._refused) or self._verifier.resumable

    @property
    def _verifier(self) -> type[Verifier]:
        part = self.verifier.find(VERIFIERS, f"{FIELD}.verifier")
        assert issubclass(part, Verifier)
        return part


def make_parts(
    params: SpeculativeParams, models: ModelPool | None = None, greedy: bool = False
) -> tuple[list[Arm], Selector, Verifier]:
    """Make the parts that a request chose, those that it leaves open included.

    Args:
        params: the request's.
        models: the pool; None: not known yet, and what depends on it is left out.
        greedy: whether no token of the answer is drawn.

    Raises:
        TurnoutError: as `_parts_of`.
    """
    return _parts_of(params.chosen(models, greedy))


def _parts_of(params: SpeculativeParams) -> tuple[list[Arm], Selector, Verifier]:
    """Make the parts that settled parameters (`SpeculativeParams.chosen`) name.

    Raises:
        TurnoutError: NOT_FOUND or INVALID_ARGUMENT: an unknown part, a wrong parameter, parts that do not fit.
    """
    if not params.arms:
        raise invalid(f"{FIELD}.drafter", "is empty; at least one drafter is needed")
    verifier: Verifier = params.verifier.make(VERIFIERS, f"{FIELD}.verifier")
    assert params.select is not None
    selector: Selector = params.select.make(SELECTORS, f"{FIELD}.select")
    arms = []
    for place, arm in enumerate(params.arms):
        if arm.drafter == NONE:
            arms.append(Arm(NoDrafter(), FixedLength()))
            continue
        alone = isinstance(params.drafter, PartChoice)
        places = Places() if alone else arm.places(f"{FIELD}.drafter.{place}")
        part = _drafter(arm.drafter, places.drafter)
        given = arm.drafter.parse(part, places.drafter)
        inside = part.inside(given, places.drafter)
        usual = arm.length or params.length
        assert usual is not None
        length = _length(usual, params.draft_length, inside.depth, places.length)
        kind = _kind(inside, verifier, length)
        drafter, nodes = part(given, kind), arm.nodes or params.nodes or inside.nodes
        drafter.where = places.drafter
        depth = length.params.most
        drafter.check_room(DraftBudget(depth, nodes or depth), places.nodes)
        arms.append(Arm(drafter, length, nodes))
    for made in arms:
        made.length.share_risk(sum(not each.drafter.abstains for each in arms))
    return arms, selector, verifier


def checked_parts(params: SpeculativeParams, models: ModelPool) -> tuple[list[Arm], Selector, Verifier]:
    """Make the parts that a request chose, and check them against the models.

    Args:
        params: of `SpeculativeParams.chosen`.
        models: the pool.

    Raises:
        TurnoutError: as `_parts_of`; also what a part refuses, say an artifact of another model.
    """
    arms, selector, verifier = _parts_of(params)
    for arm in arms:
        _check_vocabulary(arm.drafter, models)
        arm.drafter.check(models)
        arm.length.check(models)
        arm.length.check_draft(models.by_role("small" if arm.drafter.runs_on == "small" else "large"))
    verifier.check(models)
    return arms, selector, verifier


def _drafter(choice: PartChoice, where: str = FIELD) -> type[Drafter]:
    part = choice.find(DRAFTERS, where)
    assert issubclass(part, Drafter)
    return part


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
    contrasts=True,
    drafts=True,
)
async def speculative(request: Request, models: ModelPool, params: SpeculativeParams) -> AsyncIterator[Segment]:
    """Tokens are drafted, the large model verifies them in one forward; the output law is the large model's.

    Paper #111 (Speculative decoding), with the drafters, length policies, verifiers and selectors of the papers they
    name. A verifier that is not lossless says which law it has. An answer that ends in a draft cuts the round.
    """
    speculation: Speculation | None = None
    roster: Roster | None = None
    greedy = request.sequence.sampling.greedy
    if not params.refused:
        try:
            chosen = params.chosen(models, greedy)
            arms, selector, verifier = checked_parts(chosen, models)
            repeated = rounds_of(params.rounds, request.sequence.seed, arms)
            if params.is_automatic(greedy) and not repeated:  # rounds name drafters by their places among all
                roster = Roster(arms, request.sequence, models)
                arms = roster.arms
            speculation = Speculation(request, models, arms, selector, verifier, repeated)
            request.extra[RAN] = _left_open(params, chosen)
        except TurnoutError as error:
            if params.fallback == "refuse":
                raise
            params.fall_back(error)
    if speculation is None:
        request.notes.append(f"decoded plainly: {params.refused}")
        request.extra[RAN] = dict.fromkeys(PARTS)  # no part of it ran, neither what was asked for nor the usual ones
    plainly = stream(models.large, request.sequence, request.streams)
    segments = plainly if speculation is None else speculation.run()
    async with aclosing(segments) as running:  # type: ignore[type-var]
        async for segment in running:
            yield segment
    if roster is not None:
        roster.close(len(request.sequence.generated))
    if speculation is not None and not params.is_timed(greedy) and speculation.is_timed:
        request.extra[RAN]["rounds"] = {str(request.sequence.seed): speculation.choices}


def _left_open(params: SpeculativeParams, chosen: SpeculativeParams) -> dict[str, Any]:
    """What is used for parameters that the request leaves open, for the answer's usage."""
    names = {name for name in ("drafter", "length", "select") if getattr(params, name) is None}
    return chosen.model_dump(mode="json", include=names)
