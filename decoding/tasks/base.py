"""The slot of tasks: what a pool can be asked that generates no text, with parameters and a result of its own.

A module here assigns its class to `PART`; a request names it by its file. A task is a program over models as a method
is: batching, the cache, actors and cancellation are the engine's. It gets texts, and gives back a pydantic model.
"""

from __future__ import annotations

import base64
import binascii
import sys
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from decoding.parts import Part
from turnout.errors import TurnoutError, invalid, out_of_range
from turnout.registry import load, validated
from turnout.types import SamplingParams, Sharing

if TYPE_CHECKING:
    from decoding.model import Model, ModelPool
    from decoding.sequence import Sequence
    from turnout.calls import ScoredTokens

PACKAGE = "decoding.tasks"
PARAMS = "params"  # the field of a request that holds a task's parameters
MOST_CHARS = 1 << 20  # of a text among them
MOST_ENCODED = 1 << 21  # characters of bytes among them, or in a result
ENCODED = "contentEncoding"

Text = Annotated[str, Field(min_length=1, max_length=MOST_CHARS)]
Base64 = Annotated[str, Field(min_length=1, max_length=MOST_ENCODED, json_schema_extra={ENCODED: "base64"})]
Ids = str | tuple[int, ...]
# (prompt, completions, alternatives per token) -> log-likelihoods of each completion.
Scores = Callable[[str, tuple[str, ...], int], Awaitable[list["ScoredTokens"]]]
R = TypeVar("R", bound=BaseModel)


class TaskResult(BaseModel):
    """Base of every task's result."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(slots=True)
class Progress:
    """Progress of a task: how much of it is done, and what it read.

    Attributes:
        show: called with parts done and parts in all; None: unused.
        prompt_tokens: tokens that were read for it so far, as they are metered.
    """

    show: Callable[[int, int], object] | None = None
    prompt_tokens: int = 0

    def done(self, parts: int, of: int) -> None:
        """Report that some parts of all are done."""
        if self.show is not None:
            self.show(parts, of)

    def read(self, tokens: int) -> None:
        """Count tokens that a model has read."""
        self.prompt_tokens += tokens


@dataclass(slots=True)
class TaskRun:
    """A request for a task, as the task sees it. Wire types never get here.

    Attributes:
        id: of the request.
        model: which was asked: the pool's large one, or the member that the request names.
        score: scores completions of a prompt as the score endpoint does, by the same model.
        encode: token ids of a text that stands behind others; special tokens that it spells out are text.
        begin: token ids that stand before every text; () where there are none.
        end_ids: tokens that end an answer.
        sharing: says whose cache a prompt belongs to.
        tenant: whose request it is.
        low_priority: whether it yields to requests that are not.
    """

    id: str
    model: Model
    score: Scores
    encode: Callable[[str], Awaitable[list[int]]]
    begin: tuple[int, ...] = ()
    end_ids: frozenset[int] = frozenset()
    sharing: Callable[[list[int]], Sharing] = field(default=lambda _: Sharing())
    tenant: str = "default"
    low_priority: bool = False

    def sequence(self, prompt: Iterable[int], **sampling: Any) -> Sequence:
        """Make a sequence of a prompt, greedy and with the pool's end tokens; the task releases it.

        Args:
            prompt: token ids, at least one.
            sampling: of `SamplingParams`; `max_tokens` is 1 unless given.
        """
        from decoding.sequence import Sequence

        ids = list(prompt)
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1, **sampling})
        shared, low = self.sharing(ids), self.low_priority
        return Sequence(ids, params, 0, self.end_ids, sharing=shared, tenant=self.tenant, low_priority=low)

    def check_room(self, name: str, tokens: int, more: int = 0) -> None:
        """Refuse a prompt that does not fit the model's context.

        Args:
            name: of the parameter that makes it so long.
            tokens: of the prompt.
            more: that are read after it.

        Raises:
            TurnoutError: OUT_OF_RANGE.
        """
        most = self.model.max_length
        if tokens + more > most:
            raise out_of_range(f"{PARAMS}.{name}", f"{tokens + more} tokens with what is read after it; at most {most}")


class Task(Part):
    """Base of every task. Made for each request anew, with validated parameters in `params`.

    Attributes:
        Result: what `run` returns.
        file_param: the parameter that the command line takes from a file; "": none.
        file_result: the field of the result that it writes to a file; "": none.
        where: the field of a request that holds its parameters.
    """

    Result: ClassVar[type[TaskResult]]
    file_param: ClassVar[str] = ""
    file_result: ClassVar[str] = ""
    where = PARAMS

    @classmethod
    async def sample(cls, run: TaskRun, models: ModelPool) -> dict[str, Any]:
        """Parameters with which it has something to do on small random models, for conformance tests."""
        return dict(cls.Params.example)

    @abstractmethod
    async def run(self, run: TaskRun, models: ModelPool, progress: Progress) -> TaskResult:
        """Carry it out. A cancelled task frees what it holds: sequences are released in `finally`.

        Args:
            run: the request.
            models: the pool's, with its artifacts.
            progress: gets every part that is done, and all tokens that were read.

        Raises:
            TurnoutError: a parameter does not fit the models, named by `self.field`.
        """

    def field(self, name: str) -> str:
        """Name of a parameter as its caller spells it."""
        return f"{self.where}.{name}"

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """JSON schema of the parameters; in `x-result` that of the result, in `x-summary` what it does."""
        summary = (sys.modules[cls.__module__].__doc__ or "").strip().split("\n")[0]
        result = cls.Result.model_json_schema(mode="serialization")
        return {**super().schema(), "x-summary": summary, "x-result": result}


def find_task(name: str) -> type[Task]:
    """Return the task of that name.

    Raises:
        TurnoutError: NOT_FOUND, listing the tasks that exist.
    """
    part: type[Task] = load(PACKAGE, name, "name").PART
    return part


def open_task(name: str, params: dict[str, Any]) -> Task:
    """Make a task with its parameters.

    Raises:
        TurnoutError: NOT_FOUND; INVALID_ARGUMENT, naming the parameter and what is allowed.
    """
    kind = find_task(name)
    return kind(validated(kind.Params, params, PARAMS))


def of_param(error: TurnoutError) -> TurnoutError:
    """A refusal of what a task asked for itself, as one of the parameter of that name."""
    if error.field is None:
        return error
    named = f"{PARAMS}.{error.field}"
    return TurnoutError(error.code, error.message.replace(error.field, named, 1), named, error.retry_after_s)


def to_base64(data: bytes) -> str:
    """Return bytes as a JSON string."""
    return base64.b64encode(data).decode("ascii")


def from_base64(value: str, name: str) -> bytes:
    """Return the bytes of a JSON string.

    Raises:
        TurnoutError: INVALID_ARGUMENT, naming the field.
    """
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(name, "must be base64") from None
