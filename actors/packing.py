"""Operations and their results as bytes, by the types of the values in them: what is known on the other side is named.

A want goes by number, a component by its place among those that travel, a draft or the rows of a verdict by the call
that made them, a large tensor by its handle; everything else as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from actors.pickling import Handles, Name, TensorHandle, dumps, dumps_call, loads
from actors.protocol import pack_tokens, unpack_tokens
from actors.remote_objects import Arrivals, Departures, Packed
from actors.sequence_replica import Known, Mirror
from actors.state_diff import Watch
from decoding.drafters.base import Room
from decoding.model import Row, Score, Until, Want
from decoding.operations import Operation
from decoding.read_spec import Decoded
from decoding.tree import DraftTree
from decoding.verifiers.base import Verdict
from turnout.errors import Code, TurnoutError
from turnout.types import Segment, Token

if TYPE_CHECKING:
    import torch

    from actors.tensor_store import Key, Shelf

R = TypeVar("R")
Reducer = Callable[[Any], Any]


@dataclass(slots=True)
class Packer:
    """Packs the operation of one call; made anew for each.

    Attributes:
        departures: the parts and constants of the actor's life.
        known: what the actor's mirror of the call's sequence is.
        handles: tensors that the call needs, after `pack`.
        parts: what travels with it, in order, after `pack`.
        packed: the same, packed.
    """

    departures: Departures
    known: Known
    handles: list[TensorHandle] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    packed: list[Packed] = field(default_factory=list)

    def pack(self, op: Operation[Any]) -> tuple[int | type[Operation[Any]], bytes]:
        """The operation's kind, by number if possible, and its fields.

        Raises:
            TurnoutError: INTERNAL: something in it cannot be pickled.
            Exception: whatever pickling a part failed with.
        """
        for part in op.carried:
            self.packed.append(self.departures.pack(part))
            self.parts.append(part)
        reducers: dict[type[Any], Reducer] = {**_PLAIN, Want: self._want, DraftTree: self._tree, Verdict: self._verdict}
        reducers |= {type(part): self._part for part in self.parts}
        try:
            blob, self.handles = dumps_call(_by_fields(op)[1], reducers)
        except Exception as error:
            what = f"{op.name}: an argument cannot be pickled: {type(error).__name__}: {error}"
            raise TurnoutError(Code.INTERNAL, what) from error
        number = self.departures.number(type(op))
        return type(op) if number is None else number, blob

    def _want(self, want: Want) -> Any:
        number = self.departures.number(want)
        return _by_fields(want) if number is None else (_constant, (number,))

    def _tree(self, tree: DraftTree) -> Any:
        known = self.known.place_of(tree)
        return _by_fields(tree) if known is None else (_kept, known)

    def _verdict(self, verdict: Verdict) -> Any:
        known = self.known.place_of(verdict.rows)
        if known is None:
            return _packed_verdict(verdict)
        return _verdict_of, (verdict.path, pack_tokens(verdict.tokens), *known)

    def _part(self, value: Any) -> Any:
        place = next((place for place, part in enumerate(self.parts) if part is value), None)
        return value.__reduce_ex__(5) if place is None else (_part, (place,))


@dataclass(slots=True)
class Unpacker:
    """Makes a call's operation again, on the actor.

    Attributes:
        kind: of operation.
        blob: its fields, from `Packer.pack`.
        arrivals: parts and constants there.
        mirror: of the sequence.
        parts: what travelled, in the order in which it was packed: itself, and its watch.
    """

    kind: type[Operation[Any]]
    blob: bytes
    arrivals: Arrivals
    mirror: Mirror
    parts: list[tuple[Any, Watch]]

    def changes(self) -> tuple[tuple[int, dict[str, Any]], ...]:
        """What became of the parts, those that changed, by their place among them."""
        changed = ((place, watch.changed(part)) for place, (part, watch) in enumerate(self.parts))
        return tuple(each for each in changed if each[1])

    def unpack(self, tensors: Mapping[Key, torch.Tensor]) -> Operation[Any]:
        """The operation.

        Args:
            tensors: what its handles stand for.
        """
        kept, parts, constants = self.mirror.kept, self.parts, self.arrivals.constants

        def find(number: int, place: int) -> Any:
            if number not in kept:
                raise TurnoutError(Code.INTERNAL, f"what call {number} made is no longer kept by its actor")
            return kept[number][place]

        names: dict[Name, Callable[..., Any]] = {
            (__name__, "_constant"): constants.__getitem__,
            (__name__, "_kept"): find,
            (__name__, "_part"): lambda place: parts[place][0],
            (__name__, "_verdict_of"): lambda path, tokens, *rows: _verdict(path, tokens, find(*rows)),
        }
        return self.kind(*loads(self.blob, tensors, names))


def pack_result(op: Operation[R], value: R, shelf: Shelf) -> bytes:
    """What an operation returned; of a stretch that was appended only why it ended.

    Args:
        op: the operation.
        value: the result.
        shelf: of the actor: where large tensors of it stay, if they do.
    """
    least, told = op.left_bytes, op.told(value)
    reducers = _STRETCH if op.appends else _RESULT
    return dumps(told, None, 0, reducers) if least is None else dumps(told, shelf, least, reducers)


def unpack_result(packed: bytes, handles: Handles, appended: tuple[Token, ...], parts: list[Any]) -> Any:
    """What `pack_result` packed.

    Args:
        packed: by it.
        handles: where tensors that stayed are counted.
        appended: by the operation.
        parts: what it carries, or twins of that which will have their new state.
    """
    names = {(__name__, "_stretch"): lambda why: Decoded(Segment(appended, why), tuple(parts))}
    return loads(packed, handles, names)


@cache
def _values(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = [each.name for each in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _by_fields(value: Any) -> Any:
    kind: Any = type(value)
    return kind, _values(kind)(value)


def _packed_row(row: Row) -> Any:
    if row.bears_tensors:
        return _by_fields(row)
    plain = (row.token, row.entropy_bits, row.logprob, row.top, row.margin, row.forced, row.allowed_logprob)
    return _row, plain


def _row(
    token: int,
    entropy: float | None,
    logprob: float | None,
    top: Any,
    margin: float | None,
    forced: bool,
    allowed: float | None,
) -> Row:
    return Row(token, entropy, logprob, top, margin=margin, forced=forced, allowed_logprob=allowed)


def _packed_verdict(verdict: Verdict) -> Any:
    return _verdict, (verdict.path, pack_tokens(verdict.tokens), verdict.rows)


def _verdict(path: tuple[int, ...], tokens: tuple[Any, ...], rows: list[Row]) -> Verdict:
    return Verdict(path, tuple(unpack_tokens(tokens)), rows)


def _stands_for(*args: Any) -> NoReturn:
    raise TypeError("bytes with names of what the other side has are read by actors.packing only")


def _constant(number: int) -> NoReturn:
    """Stands for a value that the actor has by number."""
    _stands_for(number)


def _part(place: int) -> NoReturn:
    """Stands for a component that travels with the call."""
    _stands_for(place)


def _kept(number: int, place: int) -> NoReturn:
    """Stands for what a call had or made."""
    _stands_for(number, place)


def _verdict_of(path: tuple[int, ...], tokens: tuple[Any, ...], number: int, place: int) -> NoReturn:
    """Stands for a verdict whose rows a call made."""
    _stands_for(path, tokens, number, place)


def _stretch(stopped_by: str) -> NoReturn:
    """Stands for what an operation appended."""
    _stands_for(stopped_by)


_PLAIN: dict[type[Any], Reducer] = {Row: _packed_row, Until: _by_fields, Room: _by_fields}
_RESULT: dict[type[Any], Reducer] = {
    Row: _packed_row,
    DraftTree: _by_fields,
    Verdict: _packed_verdict,
    Score: _by_fields,
}
_STRETCH: dict[type[Any], Reducer] = {Decoded: lambda decoded: (_stretch, (decoded.segment.stopped_by,))}
