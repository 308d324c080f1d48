"""Arguments and results of operations as plain tuples: what each needs, and bytes only where tensors may stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from actors.changes import Watch
from actors.mirror import Known, Mirror
from actors.pickling import LEAST_BYTES, Handles, TensorHandle, dumps, dumps_call, loads
from actors.travelling import Arrivals, Departures, Packed
from actors.wire import Call, Op, pack_rows, pack_tokens, unpack_rows, unpack_tokens
from decoding.drafters.base import Room
from decoding.model import Row, Score, Until, Want
from decoding.tree import DraftTree
from decoding.verifiers.base import Verdict
from turnout.errors import Code, TurnoutError

if TYPE_CHECKING:
    import torch

    from actors.shelf import Key, Shelf


AS_RETURNED = (Op.ABSORB, Op.HELD_KV, Op.IMPORT_KV)


@dataclass(slots=True)
class Packer:
    """Packs the arguments of one call; made anew for each.

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

    def pack(self, call: Call) -> tuple[Any, ...]:
        """The call's arguments."""
        return _PACK[call.op](self, *call.args)

    def part(self, part: Any) -> Packed:
        """A part that travels."""
        self.parts.append(part)
        self.packed.append(self.departures.pack(part))
        return self.packed[-1]

    def want(self, want: Want) -> int | Want:
        """What to read: there are few of them, so by number."""
        number = self.departures.number(want)
        return want if number is None else number

    def in_bytes(self, value: Any) -> bytes:
        """Something with tensors in it, or handles."""
        blob, handles = dumps_call(value)
        self.handles += handles
        return blob

    def tree(self, tree: DraftTree) -> int | tuple[Any, ...] | bytes:
        """A draft: the number of the call that made it, if the actor still has it."""
        number = self.known.number_of(tree)
        if number is not None:
            return number
        return self.in_bytes(tree) if _has_tensors(tree) else _plain(tree)

    def _extend(self, tokens: tuple[int, ...], want: Want, every: bool) -> tuple[Any, ...]:
        return tuple(tokens), self.want(want), every

    def _decode(self, until: Until) -> tuple[Any, ...]:
        return until.max_tokens, tuple(self.part(rule) for rule in until.rules)

    def _expand(self, tree: DraftTree, start: int, want: Want) -> tuple[Any, ...]:
        return self.tree(tree), start, self.want(want)

    def _sketch(self, sketch: Any, want: Want) -> tuple[Any, ...]:
        return self.in_bytes(sketch), self.want(want)

    def _read(self, states: Any, paths: Any, want: Want, normed: bool) -> tuple[Any, ...]:
        return self.in_bytes((states, paths)), self.want(want), normed

    def _propose(self, drafter: Any, room: Room, length: Any) -> tuple[Any, ...]:
        return self.part(drafter), (room.depth, room.nodes, room.sequences), self.part(length)

    def _verify(self, draft: DraftTree, verifier: Any, want: Want) -> tuple[Any, ...]:
        return self.tree(draft), self.part(verifier), self.want(want)

    def _teach(self, drafter: Any, draft: DraftTree, verdict: Verdict) -> tuple[Any, ...]:
        rows: int | bytes | tuple[Any, ...] | None = self.known.number_of(verdict.rows)
        if rows is None:
            rows = self.in_bytes(verdict.rows) if any(map(_bears_tensors, verdict.rows)) else pack_rows(verdict.rows)
        return self.part(drafter), self.tree(draft), verdict.path, pack_tokens(verdict.tokens), rows

    def _import_kv(self, start: int, kv: Any) -> tuple[Any, ...]:
        return start, self.in_bytes(kv)

    def _as_given(self, *args: Any) -> tuple[Any, ...]:
        return args


_PACK: dict[Op, Callable[..., tuple[Any, ...]]] = {
    Op.EXTEND: Packer._extend,
    Op.DECODE: Packer._decode,
    Op.EXPAND: Packer._expand,
    Op.SKETCH: Packer._sketch,
    Op.READ: Packer._read,
    Op.PROPOSE: Packer._propose,
    Op.VERIFY: Packer._verify,
    Op.TEACH: Packer._teach,
    Op.SCORE: Packer._as_given,
    Op.ABSORB: Packer._as_given,
    Op.HELD_KV: Packer._as_given,
    Op.EXPORT_KV: Packer._as_given,
    Op.IMPORT_KV: Packer._import_kv,
}


@dataclass(slots=True)
class Unpacker:
    """Makes a call's arguments again, on the actor.

    Attributes:
        arrivals: parts and constants there.
        mirror: of the sequence.
        parts: what travelled, in the order in which it was packed: as it came, itself, and its watch.
    """

    arrivals: Arrivals
    mirror: Mirror
    parts: list[tuple[Packed, Any, Watch]]

    @staticmethod
    def parts_of(op: Op, packed: tuple[Any, ...]) -> tuple[Packed, ...]:
        """The parts among a call's arguments, as they came."""
        if op is Op.DECODE:
            return tuple(packed[1])
        if op is Op.PROPOSE:
            return packed[0], packed[2]
        if op is Op.VERIFY:
            return (packed[1],)
        return (packed[0],) if op is Op.TEACH else ()

    def changes(self) -> tuple[tuple[int, dict[str, Any]], ...]:
        """What became of the parts, those that changed, by their place among them."""
        changed = ((place, watch.changed(part)) for place, (_, part, watch) in enumerate(self.parts))
        return tuple(each for each in changed if each[1])

    def unpack(self, op: Op, packed: tuple[Any, ...], tensors: Mapping[Key, torch.Tensor]) -> tuple[Any, ...]:
        """The arguments.

        Args:
            op: of which operation.
            packed: from `Packer.pack`.
            tensors: what its handles stand for.
        """
        parts = [part for _, part, _ in self.parts]
        if op is Op.DECODE:
            return (Until(tuple(parts), packed[0]),)
        if op is Op.EXTEND:
            return packed[0], self._want(packed[1]), packed[2]
        if op is Op.EXPAND:
            return self._tree(packed[0], tensors), packed[1], self._want(packed[2])
        if op is Op.SKETCH:
            return loads(packed[0], tensors), self._want(packed[1])
        if op is Op.READ:
            return (*loads(packed[0], tensors), self._want(packed[1]), packed[2])
        if op is Op.PROPOSE:
            return parts[0], Room(*packed[1]), parts[1]
        if op is Op.VERIFY:
            return self._tree(packed[0], tensors), parts[0], self._want(packed[2])
        if op is Op.IMPORT_KV:
            return packed[0], loads(packed[1], tensors)
        if op is Op.TEACH:
            verdict = Verdict(packed[2], tuple(unpack_tokens(packed[3])), self._rows(packed[4], tensors))
            return parts[0], self._tree(packed[1], tensors), verdict
        return packed

    def _want(self, packed: int | Want) -> Want:
        return self.arrivals.constants[packed] if isinstance(packed, int) else packed

    def _tree(self, packed: Any, tensors: Mapping[Key, torch.Tensor]) -> DraftTree:
        if isinstance(packed, int):
            return self._kept(packed)[0]
        if isinstance(packed, bytes):
            tree: DraftTree = loads(packed, tensors)
            return tree
        return _tree(packed)

    def _rows(self, packed: Any, tensors: Mapping[Key, torch.Tensor]) -> list[Row]:
        if isinstance(packed, int):
            kept = self._kept(packed)[1]
            assert kept is not None
            return kept
        if isinstance(packed, bytes):
            rows: list[Row] = loads(packed, tensors)
            return rows
        return unpack_rows(packed)

    def _kept(self, number: int) -> tuple[DraftTree, list[Row] | None]:
        kept = self.mirror.kept.get(number)
        if kept is None:
            raise TurnoutError(Code.INTERNAL, f"what call {number} made is no longer kept beside the model")
        return kept


def pack_result(op: Op, args: tuple[Any, ...], value: Any, shelf: Shelf) -> Any:
    """What an operation returned; large tensors of drafts and verdicts stay on the shelf.

    Args:
        op: which.
        args: its arguments.
        value: the result.
        shelf: of the actor.
    """
    if op is Op.DECODE:
        return value.stopped_by
    if op is Op.PROPOSE:
        return dumps(value, shelf, LEAST_BYTES) if _has_tensors(value) else _plain(value)
    if op is Op.VERIFY:
        want: Want = args[2]
        rows = [_told(row, want) for row in value.rows] if _wants_tensors(want) else None
        return (
            value.path,
            pack_tokens(value.tokens),
            pack_rows(value.rows) if rows is None else dumps(rows, shelf, LEAST_BYTES),
        )
    if op is Op.SCORE:
        return [(score.token_logprobs, score.greedy, score.top) for score in value]
    if op is Op.EXPORT_KV:
        return dumps(value, shelf, 0) if args[2] else dumps(value, None)
    if op in AS_RETURNED:
        return value
    return dumps(value, None) if any(map(_bears_tensors, value)) else pack_rows(value)


def unpack_result(op: Op, packed: Any, handles: Handles) -> Any:
    """What `pack_result` packed; of a decoding stretch only why it ended."""
    if op is Op.PROPOSE:
        return loads(packed, handles) if isinstance(packed, bytes) else _tree(packed)
    if op is Op.VERIFY:
        path, tokens, rows = packed
        read = loads(rows, handles) if isinstance(rows, bytes) else unpack_rows(rows)
        return Verdict(path, tuple(unpack_tokens(tokens)), read)
    if op is Op.SCORE:
        return [Score(*each) for each in packed]
    if op is Op.DECODE or op in AS_RETURNED:
        return packed
    return loads(packed, handles) if isinstance(packed, bytes) else unpack_rows(packed)


def _plain(tree: DraftTree) -> tuple[Any, ...]:
    return tree.tokens, tree.parents, tree.source, tree.sequences


def _tree(packed: tuple[Any, ...]) -> DraftTree:
    tokens, parents, source, sequences = packed
    return DraftTree(tokens, parents, source, (), sequences)


def _has_tensors(tree: DraftTree) -> bool:
    return tree.extra is not None or bool(tree.proposals)


def _wants_tensors(want: Want) -> bool:
    return want.probs or want.logits or bool(want.hidden) or bool(want.before)


def _bears_tensors(row: Row) -> bool:
    return row.probs is not None or row.logits is not None or bool(row.hidden) or bool(row.before)


def _told(row: Row, want: Want) -> Row:
    """A row without the tensors that only the verifier wanted."""
    return replace(row, probs=row.probs if want.probs else None, logits=row.logits if want.logits else None)
