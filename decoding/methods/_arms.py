"""Arms of `speculative` as requests give them: a drafter with its length policy, and the rounds they drafted."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, PrivateAttr, RootModel, ValidationError

from decoding.speculation import STRETCH, Arm, Choice
from turnout.errors import invalid
from turnout.part_choice import PartChoice
from turnout.registry import MethodParams, explain

Form = TypeVar("Form", bound=BaseModel)

FIELD = "method.params"
MOST_NODES = 512
MOST_ARMS = 16
MOST_ROUNDS = 65_536


@dataclass(frozen=True, slots=True)
class Places:
    """Fields of a request that give an arm's drafter, its length policy and its nodes: its own, or all arms'."""

    drafter: str = f"{FIELD}.drafter"
    length: str = f"{FIELD}.length"
    nodes: str = f"{FIELD}.nodes"


class ArmParams(MethodParams):
    """One drafter, with its own length policy if it has one; "none" decodes plainly where its turn comes."""

    drafter: Annotated[PartChoice, Field(json_schema_extra={"x-slot": "drafters"})]
    length: Annotated[PartChoice | None, Field(json_schema_extra={"x-slot": "lengths"})] = None
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


ArmOrStretch = Annotated[int, Field(ge=STRETCH, lt=MOST_ARMS)]
DepthOrTokens = Annotated[int, Field(ge=0, le=MOST_ROUNDS)]


class Rounds(RootModel[Annotated[tuple[tuple[ArmOrStretch, DepthOrTokens], ...], Field(max_length=MOST_ROUNDS)]]):
    """Rounds of an answer: see `decoding.speculation.Choice`."""


def parsed(form: type[Form], value: Any, where: str) -> Form:
    """A value of a parameter, read.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field and what is allowed.
    """
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise explain(error, where, form) from None


def rounds_of(given: Mapping[str, Rounds] | None, seed: int, arms: Items[Arm]) -> tuple[Choice, ...]:
    """Rounds that a request wants repeated.

    Args:
        given: of all answers, by seed.
        seed: the answer's.
        arms: all that the request may use.

    Raises:
        TurnoutError: INVALID_ARGUMENT: a round of a drafter that the request does not name, deeper than its drafts may
            be, or without a token.
    """
    mine = (given or {}).get(str(seed))
    rounds = mine.root if mine is not None else ()
    for place, (arm, size) in enumerate(rounds):
        where, got = f"{FIELD}.rounds.{seed}.{place}", f"(got [{arm}, {size}])"
        if arm >= len(arms) or (arm == STRETCH and size == 0):
            allowed = f"[drafter below {len(arms)}, depth], or [{STRETCH}, tokens] with at least 1 token"
            raise invalid(where, f"must be {allowed} {got}")
        if arm != STRETCH and size > arms[arm].length.params.most:
            raise invalid(where, f"may be no deeper than the drafter's {arms[arm].length.params.most} {got}")
    return rounds
