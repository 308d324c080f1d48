"""Operations of a model as values: their arguments and results.

An operation is a frozen dataclass; `Model.do` carries it out. To add one, write its dataclass here, or in the module
that uses it, and a handler (see `Handlers`) or its own `run`: code that forwards operations forwards this one too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from decoding.partial_forward import Sketch
from decoding.read_spec import Decoded, Readout, ReadSpec, Score, StopCondition
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.state import load_state, twin
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.drafters.base import DraftBudget, Drafter
    from decoding.lengths.base import LengthPolicy
    from decoding.verifiers.base import Verifier, VerifyResult

R = TypeVar("R")
M = TypeVar("M")
O = TypeVar("O", bound="Operation[Any]")  # noqa: E741

LEAST_BYTES = 2048  # of a tensor that stays next to the model: a smaller one travels faster than it is fetched


class Operation(Generic[R]):
    """Operation on one sequence, as a value; `R` is the type of its result.

    Components that it carries (drafters, rules, ...) are fields and stay as its caller sees them: new state is part of
    the result, and the caller writes it into its own objects (`settle`). All else that a drafter learns, its working
    memory, is next to the model that carries the operation out.

    Attributes:
        name: in traces and errors.
        appends: whether the model makes the sequence longer.
        fills_cache: whether the model first computes what its cache lacks of the sequence.
        answers: whether a caller waits for it; if not, a fault in it is raised by the sequence's next operation.
    """

    __slots__ = ()
    name: ClassVar[str] = "unknown"
    appends: ClassVar[bool] = False
    fills_cache: ClassVar[bool] = True
    answers: ClassVar[bool] = True

    @property
    def carried(self) -> tuple[Any, ...]:
        """Components among its fields: a remote model keeps a copy of each, and gets their state when it changes."""
        return ()

    @property
    def left_bytes(self) -> int | None:
        """Size from which tensors of the result stay next to a remote model; None: all travel."""
        return None

    def for_caller(self, value: R) -> R:
        """Return the result as a remote model sends it: without what only the model itself needed."""
        return value

    def with_states(self, value: R, states: Mapping[int, Any]) -> R:
        """Return a result that came from a remote model, with the new state of what the operation carries.

        Args:
            value: as it came.
            states: of those of `carried` whose state has changed, by place.
        """
        return value

    def settle(self, value: R) -> None:
        """Write the new state in the result into the carried components; the caller does so when it is done."""

    def kept(self, value: R) -> tuple[Any, ...]:
        """Objects of this operation or its result that later ones take: a remote model keeps the last few."""
        return ()

    async def run(self, model: Any, seq: Sequence) -> R:
        """Carry it out by other operations of the model; not called on models that have a handler for it.

        Raises:
            NotImplementedError: this model cannot do it.
        """
        raise NotImplementedError(f"{type(model).__name__} cannot {self.name}")


class Handlers(Generic[M]):
    """Handlers of one kind of model, by operation; operations without a handler use their own `run`."""

    def __init__(self) -> None:
        self._handlers: dict[type[Operation[Any]], Callable[[M, Sequence, Any], Awaitable[Any]]] = {}

    def of(
        self, kind: type[O]
    ) -> Callable[[Callable[[M, Sequence, O], Awaitable[R]]], Callable[[M, Sequence, O], Awaitable[R]]]:
        """Decorate the handler of an operation."""

        def enter(handler: Callable[[M, Sequence, O], Awaitable[R]]) -> Callable[[M, Sequence, O], Awaitable[R]]:
            self._handlers[kind] = handler
            return handler

        return enter

    def has(self, op: Operation[Any]) -> bool:
        """Return whether there is a handler of an operation."""
        return type(op) in self._handlers

    async def do(self, model: M, seq: Sequence, op: Operation[R]) -> R:
        """Carry out an operation."""
        handler = self._handlers.get(type(op))
        value: R = await (op.run(model, seq) if handler is None else handler(model, seq, op))
        return value


@dataclass(frozen=True, slots=True)
class Extend(Operation[list[Readout]]):
    """See `decoding.model.Model.extend`."""

    name: ClassVar[str] = "extend"
    tokens: tuple[int, ...] = ()
    want: ReadSpec = ReadSpec()
    every: bool = False


@dataclass(frozen=True, slots=True)
class Decode(Operation[Decoded]):
    """See `decoding.model.Model.decode`. Its rules stay as they are: the model works on twins of them."""

    name: ClassVar[str] = "decode"
    appends: ClassVar[bool] = True
    until: StopCondition = StopCondition()

    @property
    def carried(self) -> tuple[Any, ...]:
        """The rules."""
        return self.until.rules

    def with_states(self, value: Decoded, states: Mapping[int, Any]) -> Decoded:
        """Return the result with twins of the rules whose state has changed."""
        rules = list(self.until.rules)
        for place, state in states.items():
            rules[place] = twin(rules[place])
            load_state(rules[place], state)
        return Decoded(value.segment, tuple(rules))

    def settle(self, value: Decoded) -> None:
        """Let the rules take over their new state."""
        self.until.settle(value.rules)


@dataclass(frozen=True, slots=True)
class Expand(Operation[list[Readout]]):
    """See `decoding.model.Model.expand`."""

    name: ClassVar[str] = "expand"
    tree: DraftTree
    start: int
    want: ReadSpec


@dataclass(frozen=True, slots=True)
class PartialForward(Operation[list[Readout]]):
    """See `decoding.model.Model.partial_forward`."""

    name: ClassVar[str] = "sketch"
    sketch: Sketch
    want: ReadSpec


@dataclass(frozen=True, slots=True)
class Read(Operation[list[Readout]]):
    """See `decoding.model.Model.read`."""

    name: ClassVar[str] = "read"
    fills_cache: ClassVar[bool] = False
    states: torch.Tensor
    paths: Items[tuple[int, ...]]
    want: ReadSpec
    normed: bool = False


@dataclass(frozen=True, slots=True)
class Choose(Operation[list[Readout]]):
    """See `decoding.model.Model.choose`.

    Raises:
        ValueError: there is not one row of logits for each path.
    """

    name: ClassVar[str] = "choose"
    fills_cache: ClassVar[bool] = False
    logits: torch.Tensor
    paths: Items[tuple[int, ...]]
    want: ReadSpec

    def __post_init__(self) -> None:
        if len(self.logits.shape) != 2 or self.logits.shape[0] != len(self.paths):
            raise ValueError(f"logits: {list(self.logits.shape)}, but [{len(self.paths)}, vocabulary] for these paths")

    def histories(self, seq: Sequence, vocab_size: int) -> list[RowContext]:
        """Return the context of each row.

        Raises:
            ValueError: the logits are of another vocabulary.
        """
        if self.logits.shape[1] != vocab_size:
            raise ValueError(f"logits: {self.logits.shape[1]} columns, but the vocabulary has {vocab_size}")
        return [RowContext(seq, path) for path in self.paths]


@dataclass(frozen=True, slots=True)
class Proposed:
    """Draft, with the state of the drafter and the length policy after it: see `decoding.state.Stateful`."""

    draft: DraftTree
    drafter: tuple[Any, ...]
    length: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Propose(Operation[Proposed]):
    """See `decoding.model.Model.propose`."""

    name: ClassVar[str] = "propose"
    drafter: Drafter
    room: DraftBudget
    length: LengthPolicy

    @property
    def carried(self) -> tuple[Any, ...]:
        """The drafter and the length policy."""
        return self.drafter, self.length

    @property
    def left_bytes(self) -> int:
        """Distributions stay for `Verify`."""
        return LEAST_BYTES

    def kept(self, value: Proposed) -> tuple[Any, ...]:
        """Return the draft."""
        return (value.draft,)

    def with_states(self, value: Proposed, states: Mapping[int, Any]) -> Proposed:
        """Return the result with the state of both, as it was where it has not changed."""
        drafter = states[0] if 0 in states else self.drafter.state()
        length = states[1] if 1 in states else self.length.state()
        return Proposed(value.draft, drafter, length)

    def settle(self, value: Proposed) -> None:
        """Let both take over their new state."""
        self.drafter.load_state(value.drafter)
        self.length.load_state(value.length)

    async def run(self, model: Any, seq: Sequence) -> Proposed:
        """Ask the drafter."""
        draft = await self.drafter.propose(model, seq, self.room, self.length)
        return Proposed(draft, self.drafter.state(), self.length.state())


@dataclass(frozen=True, slots=True)
class Verify(Operation["VerifyResult"]):
    """See `decoding.model.Model.verify`."""

    name: ClassVar[str] = "verify"
    draft: DraftTree
    verifier: Verifier
    want: ReadSpec = ReadSpec(draw=None)

    @property
    def carried(self) -> tuple[Any, ...]:
        """The verifier."""
        return (self.verifier,)

    @property
    def left_bytes(self) -> int:
        """Rows stay for drafters that learn from them."""
        return LEAST_BYTES

    def for_caller(self, value: VerifyResult) -> VerifyResult:
        """Return the verdict without tensors that only the verifier wanted."""
        want = self.want
        if not any(row.bears_tensors for row in value.rows):
            return value
        if want.hidden or want.before or want.probs or want.logits:
            rows = [
                replace(row, probs=row.probs if want.probs else None, logits=row.logits if want.logits else None)
                for row in value.rows
            ]
        else:
            rows = [replace(row, probs=None, logits=None, hidden={}, before={}) for row in value.rows]
        return replace(value, rows=rows)

    def with_states(self, value: VerifyResult, states: Mapping[int, Any]) -> VerifyResult:
        """Return the verdict with the state of the verifier."""
        state = states[0] if states else self.verifier.state()
        return replace(value, state=state) if state else value

    def settle(self, value: VerifyResult) -> None:
        """Let the verifier take over its new state."""
        self.verifier.load_state(value.state)

    def kept(self, value: VerifyResult) -> tuple[Any, ...]:
        """Return the draft, and the rows read."""
        return self.draft, value.rows


@dataclass(frozen=True, slots=True)
class Observe(Operation[None]):
    """Round that a drafter is to learn from: how `decoding.model.Model.observe` travels."""

    name: ClassVar[str] = "teach"
    answers: ClassVar[bool] = False
    drafter: Drafter
    draft: DraftTree
    verdict: VerifyResult

    @property
    def carried(self) -> tuple[Any, ...]:
        """The drafter."""
        return (self.drafter,)


@dataclass(frozen=True, slots=True)
class ScoreContinuations(Operation[list[Score]]):
    """See `decoding.model.Model.score`."""

    name: ClassVar[str] = "score"
    continuations: Items[tuple[int, ...]]
    top: int = 0

    async def run(self, model: Any, seq: Sequence) -> list[Score]:
        """Extend the sequence by one continuation after the other."""
        from decoding.scoring import score_continuation

        return [await score_continuation(model, seq, each, self.top) for each in self.continuations]


@dataclass(frozen=True, slots=True)
class PrefillAhead(Operation[None]):
    """See `decoding.model.Model.prefill_ahead`."""

    name: ClassVar[str] = "absorb"
