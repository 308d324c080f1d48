"""Choice of a scorer in an experiment's file, and the protocol of scorers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, cast

from pydantic import Field, FiniteFloat, field_validator, model_validator

from turnout.config import Section
from turnout.errors import FieldError

if TYPE_CHECKING:
    from pool.local_pool import LocalPool

SCORERS = "experiments.grid.scorers"
FieldName = Annotated[str, Field(min_length=1, max_length=200)]


class ExactChoice(Section):
    """The answer is the row's, but for blanks at its ends; what follows the last `Answer:` counts."""

    kind: Literal["exact"] = "exact"
    answer: Annotated[FieldName, Field(description="field with the right answer")] = "answer"
    ignore_case: Annotated[bool, Field(description="whether capitals matter not")] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields a row must have."""
        return (self.answer,)


class NumericChoice(Section):
    """The last number of the answer is the row's."""

    kind: Literal["numeric"]
    answer: Annotated[FieldName, Field(description="field with the right number")] = "answer"
    tolerance: Annotated[FiniteFloat, Field(ge=0, description="largest relative error")] = 0.0

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields a row must have."""
        return (self.answer,)


class RegexChoice(Section):
    """A regular expression is found in the answer."""

    kind: Literal["regex"]
    pattern: Annotated[str | None, Field(description="for all rows; absent: `field` holds each row's")] = None
    field: Annotated[FieldName, Field(description="field with the expression")] = "answer"

    @field_validator("pattern")
    @classmethod
    def _check(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"is no regular expression: {error}") from None
        return value

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields a row must have."""
        return () if self.pattern is not None else (self.field,)


class UnitTestsChoice(Section):
    """Python tests pass on the code in the answer, in a process that may do little."""

    kind: Literal["unit_tests"]
    tests: Annotated[FieldName, Field(description="field with Python code that raises where the answer is wrong")] = (
        "tests"
    )
    prefix: Annotated[FieldName | None, Field(description="field with code that stands before the answer")] = None
    timeout_s: Annotated[FiniteFloat, Field(gt=0, le=600, description="time on the clock, seconds")] = 10.0
    cpu_s: Annotated[int, Field(ge=1, le=600, description="processor time, seconds")] = 5
    memory_bytes: Annotated[
        int, Field(ge=32 << 20, description="address space of a process, and memory of all of them together")
    ] = 512 << 20
    file_bytes: Annotated[int, Field(ge=0, description="largest file written")] = 1 << 20
    folder_bytes: Annotated[int, Field(ge=0, description="all files together")] = 64 << 20
    processes: Annotated[int, Field(ge=1, le=1024, description="processes in addition to the first")] = 8

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields a row must have."""
        return (self.tests, *([self.prefix] if self.prefix else []))


class LikelihoodChoice(Section):
    """Mean log-probability of a row's text after its prompt, nats a token; nothing is generated."""

    kind: Literal["likelihood"]
    text: Annotated[FieldName, Field(description="field with the text that is scored")] = "answer"

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields a row must have."""
        return (self.text,)


class JudgeChoice(Section):
    """A model grades the answer; its last number is the grade."""

    kind: Literal["judge"]
    address: Annotated[str | None, Field(description="gRPC address of a served model; absent: the cell's pool")] = None
    key_file: Annotated[
        str | None, Field(description="file with the API key that the server asks for; it changes no grade")
    ] = None
    model: Annotated[str, Field(description="who grades: a model or pool; absent: the large one")] = ""
    template: Annotated[
        str, Field(description="the question put to it; {prompt}, {answer} and fields are filled in")
    ] = "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nHow good is this answer, from 0 to 10? Reply with a number."
    most: Annotated[FiniteFloat, Field(gt=0, description="best grade")] = 10.0
    max_tokens: Annotated[int, Field(ge=1, le=4096, description="longest reply")] = 64
    timeout_s: Annotated[FiniteFloat, Field(gt=0, le=600, description="longest wait for a reply, seconds")] = 60.0
    fields: Annotated[tuple[FieldName, ...], Field(description="fields of a row that the template uses")] = ()

    @model_validator(mode="after")
    def _check_key(self) -> JudgeChoice:
        if self.key_file is not None and self.address is None:
            raise FieldError("key_file", "goes with an address: a model of the pool asks for no key")
        return self

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields a row must have."""
        return self.fields


class DemoChoice(Section):
    """The task's own check."""

    kind: Literal["demo"]
    task: str

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields a row must have."""
        return ("result",)


ScorerChoice = Annotated[
    ExactChoice | NumericChoice | RegexChoice | UnitTestsChoice | LikelihoodChoice | JudgeChoice | DemoChoice,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class Item:
    """A row of a dataset.

    Attributes:
        id: unique in its dataset.
        prompt: what is asked.
        fields: all of the row.
    """

    id: str
    prompt: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """Score of an answer, with a note where the reason is not plain to see.

    Attributes:
        value: from 0 to 1, but for likelihoods.
        note: for people.
    """

    value: float
    note: str = ""


class Scorer(Protocol):
    """Scorer of answers; a module of `experiments.grid.scorers` assigns its maker to `SCORER`."""

    generates: bool

    async def score(self, item: Item, answer: str, pool: LocalPool | None, model: str) -> Score:
        """Score one answer.

        Args:
            item: what was asked.
            answer: the text; empty where the scorer needs none.
            pool: that answered; None where none is loaded, as of answers in a log.
            model: of the pool, that answers alone; the pool's name where several answer together.

        Raises:
            TurnoutError: this answer cannot be scored; the message says why.
        """
        ...


def open_scorer(choice: Any) -> Scorer:
    """The scorer that a file chose."""
    return cast(Scorer, importlib.import_module(f"{SCORERS}.{choice.kind}").SCORER(choice))
