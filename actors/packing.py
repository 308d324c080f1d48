"""Operations and their results as plain tuples, which are pickled with the message they are in.

Every class of operation and of result is packed by position, with its trailing defaults left out. What the other side
has is named: classes of operations and wants by number, components by their place among those that the call carries,
drafts and rows by the call that made them. Tensors, and fields whose annotation is not known here, become bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from actors.pickling import Handles, TensorHandle, dumps, dumps_call, loads
from actors.protocol import pack_tokens, trimmed, unpack_tokens
from actors.remote_objects import ObjectCopy, Packed, Receiver, Sender
from actors.sequence_replica import Replica, ReplicaView
from decoding.drafters.base import DraftBudget
from decoding.model import Readout, ReadSpec, Score, StopCondition
from decoding.operations import Operation, Proposed
from decoding.read_spec import Decoded
from decoding.tree import DraftTree
from decoding.verifiers.base import VerifyResult
from turnout.errors import Code, TurnoutError
from turnout.types import Segment, Token

if TYPE_CHECKING:
    import torch

    from actors.tensor_store import Key, TensorStore

R = TypeVar("R")


@dataclass(slots=True)
class Packer:
    """Packs the operation of one call; made anew for each.

    Attributes:
        sender: of the actor's incarnation.
        known: what the actor's replica of the call's sequence is.
        handles: tensors that the call needs, after `pack`.
        parts: the components it carries, after `pack`.
        packed: the same, packed.
    """

    sender: Sender
    known: ReplicaView
    handles: list[TensorHandle] = field(default_factory=list)
    parts: tuple[Any, ...] = ()
    packed: list[Packed] = field(default_factory=list)

    def pack(self, op: Operation[Any]) -> tuple[Any, ...]:
        """Return the operation's class, by number if possible, and its fields.

        Raises:
            TurnoutError: INTERNAL: a field cannot be pickled.
            Exception: pickling a component failed.
        """
        self.parts = op.carried
        for part in self.parts:
            self.packed.append(self.sender.pack(part))
        kind: Any = type(op)
        number = self.sender.number(kind)
        values: list[Any] = [kind if number is None else number]
        end = 1
        try:
            for name, codec, default in _layout(kind):
                value = getattr(op, name)
                values.append(codec.pack(self, value))
                if value is not default and (codec is not _PLAIN or value != default):
                    end = len(values)
        except Exception as error:
            what = f"{op.name}: an argument cannot be pickled: {type(error).__name__}: {error}"
            raise TurnoutError(Code.INTERNAL, what) from error
        return tuple(values[:end])

    def in_bytes(self, value: Any) -> bytes:
        """Return something with tensors in it, or handles, as bytes."""
        blob, handles = dumps_call(value)
        self.handles += handles
        return blob

    def want(self, want: ReadSpec) -> int | ReadSpec:
        """Return a want's number: there are few of them."""
        number = self.sender.number(want)
        return want if number is None else number

    def part(self, value: Any) -> int | tuple[int, ...] | bytes:
        """Return the place of a component, or of several, among those carried; any other value as bytes."""
        place = self._place(value)
        if place is not None:
            return place
        if type(value) is tuple:
            places = tuple(map(self._place, value))
            if None not in places:
                return places  # type: ignore[return-value]
        return self.in_bytes(value)

    def _place(self, value: Any) -> int | None:
        for place, part in enumerate(self.parts):
            if part is value:
                return place
        return None

    def until(self, until: StopCondition) -> Any:
        """Return its limit, and its rules where it has any."""
        return (until.max_tokens, self.part(until.rules)) if until.rules else until.max_tokens

    def tree(self, tree: DraftTree) -> Any:
        """Return a draft's place among what the actor keeps, or itself."""
        known = self.known.place_of(tree)
        return _pack_tree(tree, self.in_bytes) if known is None else known

    def verdict(self, verdict: VerifyResult) -> Any:
        """Return a verdict, its rows by their place among what the actor keeps."""
        rows: Any = self.known.place_of(verdict.rows)
        if rows is None:
            rows = _pack_rows(verdict.rows, self.in_bytes)
        return verdict.path, pack_tokens(verdict.tokens), rows


@dataclass(slots=True)
class Unpacker:
    """Makes a call's operation again, on the actor.

    Attributes:
        kind: class of the operation.
        values: its fields, from `Packer.pack`.
        constants: of the actor.
        replica: of the sequence.
        copies: of the components that it carries.
        tensors: what its handles stand for; set by `unpack`.
    """

    kind: Any
    values: tuple[Any, ...]
    constants: Mapping[int, Any]
    replica: Replica
    copies: list[ObjectCopy]
    tensors: Mapping[Key, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, packed: tuple[Any, ...], receiver: Receiver, replica: Replica, copies: list[ObjectCopy]) -> Unpacker:
        """Of what `Packer.pack` returned."""
        return cls(kind_of(packed, receiver), packed[1:], receiver.constants, replica, copies)

    def states(self) -> tuple[tuple[int, bytes], ...]:
        """Return the states of components that have changed, by their place among those carried."""
        changed = ((place, copy.changed()) for place, copy in enumerate(self.copies))
        return tuple([(place, state) for place, state in changed if state is not None])

    def unpack(self, tensors: Mapping[Key, torch.Tensor]) -> Operation[Any]:
        """Return the operation.

        Args:
            tensors: what its handles stand for.
        """
        self.tensors = tensors
        layout = zip(_layout(self.kind), self.values, strict=False)
        op: Operation[Any] = self.kind(*[codec.unpack(self, value) for (_, codec, _), value in layout])
        return op

    def from_bytes(self, blob: bytes) -> Any:
        """Return what `Packer.in_bytes` packed."""
        return loads(blob, self.tensors)

    def want(self, packed: int | ReadSpec) -> ReadSpec:
        """Return a want."""
        want: ReadSpec = self.constants[packed] if isinstance(packed, int) else packed
        return want

    def part(self, packed: int | tuple[int, ...] | bytes) -> Any:
        """Return what `Packer.part` packed."""
        if isinstance(packed, int):
            return self.copies[packed].part
        if isinstance(packed, tuple):
            return tuple(self.copies[place].part for place in packed)
        return self.from_bytes(packed)

    def until(self, packed: Any) -> StopCondition:
        """Return a limit with its rules."""
        return (
            StopCondition(self.part(packed[1]), packed[0]) if isinstance(packed, tuple) else StopCondition((), packed)
        )

    def tree(self, packed: Any) -> DraftTree:
        """Return a draft."""
        tree: DraftTree = self._kept(packed) if isinstance(packed, int) else _unpack_tree(packed, self.from_bytes)
        return tree

    def verdict(self, packed: Any) -> VerifyResult:
        """Return a verdict."""
        path, tokens, rows = packed
        read = self._kept(rows) if isinstance(rows, int) else _unpack_rows(rows, self.from_bytes)
        return VerifyResult(path, tuple(unpack_tokens(tokens)), read)

    def _kept(self, packed: int) -> Any:
        number, place = divmod(packed, 2)
        if number not in self.replica.kept:
            raise TurnoutError(Code.INTERNAL, f"what call {number} made is no longer kept by its actor")
        return self.replica.kept[number][place]


def kind_of(packed: tuple[Any, ...], receiver: Receiver) -> type[Operation[Any]]:
    """Return the class of an operation; `Operation` itself where its number is not known."""
    named = packed[0]
    kind: type[Operation[Any]] = receiver.constants.get(named, Operation) if isinstance(named, int) else named
    return kind


@dataclass(frozen=True, slots=True)
class Codec:
    """How fields of one annotation become plain values, and fields again."""

    pack: Callable[[Packer, Any], Any]
    unpack: Callable[[Unpacker, Any], Any]


_PLAIN = Codec(lambda packer, value: value, lambda unpacker, value: value)
_BYTES = Codec(Packer.part, Unpacker.part)
_CODECS: dict[str, Codec] = {
    **dict.fromkeys(("int", "bool", "int | None", "tuple[int, ...]", "Items[tuple[int, ...]]"), _PLAIN),
    "ReadSpec": Codec(Packer.want, Unpacker.want),
    "StopCondition": Codec(Packer.until, Unpacker.until),
    "DraftTree": Codec(Packer.tree, Unpacker.tree),
    "VerifyResult": Codec(Packer.verdict, Unpacker.verdict),
    "DraftBudget": Codec(
        lambda packer, room: (room.depth, room.nodes, room.sequences), lambda unpacker, packed: DraftBudget(*packed)
    ),
}


@cache
def _layout(kind: type[Operation[Any]]) -> tuple[tuple[str, Codec, Any], ...]:
    """Return name, codec and default of every field of a class of operations."""
    each: Any = kind
    return tuple((entry.name, _CODECS.get(str(entry.type), _BYTES), entry.default) for entry in fields(each))


def pack_result(op: Operation[R], value: R, store: TensorStore) -> Any:
    """Return what an operation returned, packed; of what it appended only why it ended.

    Args:
        op: the operation.
        value: the result.
        store: of the actor: where large tensors of it stay, if they do.
    """
    least: int | None = op.left_bytes
    given: Any = op.for_caller(value)

    def in_bytes(each: Any) -> bytes:
        return dumps(each, None, 0) if least is None else dumps(each, store, least)

    match given:
        case None | int():
            return given
        case Decoded():
            return 0, given.segment.stopped_by
        case Proposed():
            return 1, _pack_tree(given.draft, in_bytes)
        case VerifyResult():
            return 2, given.path, pack_tokens(given.tokens), _pack_rows(given.rows, in_bytes)
        case [Readout(), *_]:
            return 3, _pack_rows(given, in_bytes)
        case [Score(), *_]:
            return 4, [(each.token_logprobs, each.greedy, each.top, each.ranks) for each in given]
    return in_bytes(given)


def unpack_result(
    op: Operation[R], packed: Any, handles: Handles, appended: tuple[Token, ...], states: Mapping[int, Any]
) -> R:
    """Return what `pack_result` packed.

    Args:
        op: the operation.
        packed: its result.
        handles: where tensors that stayed are counted.
        appended: tokens, by the operation.
        states: new ones of what it carries, by place.
    """

    def from_bytes(blob: bytes) -> Any:
        return loads(blob, handles)

    value: Any = packed
    match packed:
        case bytes():
            value = from_bytes(packed)
        case (0, why):
            value = Decoded(Segment(appended, why), ())
        case (1, tree):
            value = Proposed(_unpack_tree(tree, from_bytes), (), ())
        case (2, path, tokens, rows):
            value = VerifyResult(path, tuple(unpack_tokens(tokens)), _unpack_rows(rows, from_bytes))
        case (3, rows):
            value = _unpack_rows(rows, from_bytes)
        case (4, scores):
            value = [Score(*each) for each in scores]
    return op.with_states(value, states)


# Fields of readouts that are numbers; most rows have the first ones at most.
_NUMBERS = (
    *("entropy_bits", "logprob", "top"),
    *("margin", "forced", "allowed_logprob", "surprise_bits", "top_processed", "processed_of", "certainty"),
)
_numbers_of = attrgetter(*_NUMBERS)
_UNREAD = _numbers_of(Readout(0))
_USUAL = 3  # of `_NUMBERS`


def _pack_rows(rows: list[Readout], in_bytes: Callable[[Any], bytes]) -> Any:
    """Return rows of numbers as tuples, a row with nothing but a token as that; rows with tensors as bytes."""
    packed: list[Any] = []
    for row in rows:
        if row.bears_tensors:
            return in_bytes(rows)
        read = _numbers_of(row)
        if read == _UNREAD:
            packed.append(row.token)
        else:
            packed.append((row.token, *(read[:_USUAL] if read[_USUAL:] == _UNREAD[_USUAL:] else read)))
    return packed


def _unpack_rows(packed: Any, from_bytes: Callable[[bytes], Any]) -> list[Readout]:
    if isinstance(packed, bytes):
        read: list[Readout] = from_bytes(packed)
        return read
    rows = []
    for each in packed:
        if isinstance(each, int):
            rows.append(Readout(each))
        else:
            token, *numbers = each
            rows.append(Readout(token, **dict(zip(_NUMBERS, numbers, strict=False))))
    return rows


def _pack_tree(tree: DraftTree, in_bytes: Callable[[Any], bytes]) -> tuple[Any, ...]:
    """Return a draft by its fields; the parents of a chain are left out, its tensors are bytes."""
    size = len(tree.tokens)
    parents = None if tree.parents == tuple(range(-1, size - 1)) else tree.parents
    rest = in_bytes((tree.proposals, tree.extra)) if tree.proposals or tree.extra is not None else None
    return tree.tokens, tree.source, *trimmed([parents, tree.sequences, rest])


def _unpack_tree(packed: tuple[Any, ...], from_bytes: Callable[[bytes], Any]) -> DraftTree:
    tokens, source, parents, sequences, rest = (*packed, None, None, None)[:5]
    proposals, extra = ((), None) if rest is None else from_bytes(rest)
    if parents is None:
        parents = tuple(range(-1, len(tokens) - 1))
    return DraftTree(tokens, parents, source, proposals, sequences or (), extra)
