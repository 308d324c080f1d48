"""One life of one actor, on the coordinator: what is said to it, and what it answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from ray.exceptions import RayActorError

from actors.group_epoch import GroupBroken
from actors.packing import Packer, unpack_result
from actors.pickling import Handles, TensorHandle
from actors.protocol import Grown, Load, ModelCard, PendingCall, ReplyKind, RequestKind, trimmed, unpack_tokens
from actors.remote_objects import Constants, ObjectNumbers, Sender
from actors.sequence_replica import ReplicaView, add_counts, keep
from actors.serialization import not_sent, pickled, store_full
from decoding.sequence import Sequence
from turnout.errors import Code, Interrupted, TurnoutError

log = logging.getLogger(__name__)


class Channel(Protocol):
    """The way to an actor."""

    def post(self, number: int, blob: bytes) -> None:
        """Send a post and wait for nothing."""
        ...

    def replies(self) -> AsyncIterator[bytes]:
        """What the actor says from now on; ends or raises when it is no more."""
        ...


class RayChannel:
    """To a Ray actor.

    Args:
        handle: of a `ModelActor`.
    """

    def __init__(self, handle: Any) -> None:
        self._post = handle.post.options(num_returns=0).remote
        self._replies = handle.replies.options(num_returns="streaming").remote

    def post(self, number: int, blob: bytes) -> None:
        """See `Channel.post`."""
        self._post(number, blob)

    async def replies(self) -> AsyncIterator[bytes]:
        """See `Channel.replies`."""
        async for item in self._replies():
            yield await item


class ConnectionGroup:
    """What the actors of one replica have in common on the coordinator.

    Args:
        generation: number of the transport's group they are in; None while they are in none.

    Attributes:
        handles: tensors that lie on their stores.
        objects: numbers of components that are sent.
        connections: by owner and life.
    """

    def __init__(self, generation: Callable[[], int | None] = lambda: None) -> None:
        self._generation = generation
        self.handles = Handles(self._notify)
        self.objects = ObjectNumbers(Constants())
        self.connections: dict[tuple[int, int], ActorConnection] = {}
        self._tickets = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, connection: ActorConnection) -> None:
        """A life began."""
        self._loop = asyncio.get_running_loop()
        self.connections[connection.owner, connection.life] = connection

    def remove(self, connection: ActorConnection) -> None:
        """A life ended."""
        self.connections.pop((connection.owner, connection.life), None)

    def ship(self, handles: list[TensorHandle], to: ActorConnection) -> list[tuple[int, int, list[Any]]]:
        """Have tensors sent to an actor, in the order of the calls that need them.

        Returns:
            For each sender: its rank, the ticket, and (key, shape, dtype) of its tensors.

        Raises:
            Interrupted: one of the senders has ended.
            GroupBroken: the actors are in no group at the moment.
        """
        away: dict[tuple[int, int], list[TensorHandle]] = {}
        for handle in handles:
            if (handle.owner, handle.life) != (to.owner, to.life):
                away.setdefault((handle.owner, handle.life), []).append(handle)
        if any(key not in self.connections for key in away):
            raise Interrupted("tensors that the call needs ended with their actor; the call must be made again")
        generation = self._generation()
        if away and generation is None:
            raise GroupBroken("the actors are in no group at the moment; the call must be made again")
        needed = []
        for key, wanted in away.items():
            ticket = (generation or 0) << 32 | next(self._tickets)
            self.connections[key].say((RequestKind.SHIP, [handle.id for handle in wanted], to.owner, ticket))
            needed.append((key[0], ticket, [(handle.key, handle.shape, handle.dtype) for handle in wanted]))
        return needed

    def _notify(self) -> None:
        """Tensors can be dropped; called by any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        for connection in self.connections.values():
            connection.say()


class ActorConnection:
    """One life of one actor. Made on the event loop that uses it; reads replies from then on.

    Messages of one turn of the event loop go out in one numbered post, in the order in which they were given.

    Args:
        line: the way there.
        card: what the actor said of itself.
        life: counts the actor's restarts.
        owner: number of the actor in its replica.
        exchange: shared with the other actors of the replica; None: it is alone.

    Attributes:
        lost: set when nothing can come any more; calls without an answer stay open, to be sent to another life.
        reason: why, where an error was raised.
        blameless: it is given up because of this process or of Ray's store, whatever it was working on.
        abandoned_ended: called when a cancelled operation has ended there.
        last_heard: when the last reply came, by `time.monotonic`.
        load: the last sign of life; None before the first.
    """

    def __init__(
        self, line: Channel, card: ModelCard, life: int = 0, owner: int = 0, exchange: ConnectionGroup | None = None
    ) -> None:
        self.card = card
        self.life = life
        self.owner = owner
        self.lost = asyncio.Event()
        self.reason: BaseException | None = None
        self.blameless = False
        self.abandoned_ended: Callable[[], None] = lambda: None
        self.last_heard = time.monotonic()
        self.load: Load | None = None
        self.bytes_posted = self.bytes_heard = 0
        self._channel = line
        self._exchange = exchange or ConnectionGroup()
        self._sender = Sender(self._exchange.objects, lambda *constant: self.say((RequestKind.CONSTANT, *constant)))
        self._numbers, self._posts, self._sids = itertools.count(1), itertools.count(), itertools.count(1)
        self._known: dict[Sequence, ReplicaView] = {}
        self._sent: dict[int, tuple[PendingCall, tuple[Any, ...]]] = {}
        self._calls: dict[PendingCall, int] = {}
        self._outbox: list[tuple[Any, ...]] = []
        self._flushes = False
        self._loop = asyncio.get_running_loop()
        self._exchange.add(self)
        self._reader = self._loop.create_task(self._read(), name=f"connection-{card.name}-{life}")

    @property
    def in_flight(self) -> list[PendingCall]:
        """Return the calls without an answer yet, cancelled ones included."""
        return [call for call, _ in self._sent.values()]

    @property
    def num_sequences(self) -> int:
        """Sequences that the actor may have a replica of."""
        return len(self._known)

    def send(self, call: PendingCall) -> None:
        """Send a call as things are now; its future gets the result."""
        if call.released:
            error = TurnoutError(Code.CANCELLED, "the sequence was released while its model worked on it")
            call.future.set_exception(error)
            return
        try:
            number, message, parts = self._message(call)
        except Exception as error:
            if not call.future.done():
                call.future.set_exception(error)
            return
        self._sent[number] = (call, parts)
        self._calls[call] = number
        self.say(message)

    def observe(self, call: PendingCall) -> None:
        """Send a call that gets no answer."""
        try:
            _, message, _ = self._message(call)
        except Interrupted:  # what was read is gone: nothing can be learnt from it
            return
        self.say(message)

    def _message(self, call: PendingCall) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
        known = self._known.get(call.seq) or self._known.setdefault(call.seq, ReplicaView(next(self._sids)))
        number = next(self._numbers)
        packer = Packer(self._sender, known)
        try:
            packed = packer.pack(call.op)
            needed = self._exchange.ship(packer.handles, self) if packer.handles else ()
        except Exception:
            if packer.packed:  # the sender takes the actor to have these from now on
                self.say((RequestKind.PARTS, tuple(packer.packed)))
            raise
        update, parts = trimmed([*known.update(call.seq, self._sender.network)]), tuple(packer.packed)
        call.base = len(call.seq)
        known.appending += call.op.appends
        message = trimmed([RequestKind.CALL.value, number, update, packed, parts, needed, call.trace])
        return number, message, packer.parts

    def cancel(self, call: PendingCall) -> None:
        """Cancel a call, also on the actor. What it cost is still counted."""
        call.future.cancel()
        number = self._calls.pop(call, None)
        if number is not None:
            self._disown(call, self._sent[number][1])
            self.say((RequestKind.CANCEL, number))

    def _disown(self, call: PendingCall, parts: tuple[Any, ...]) -> None:
        """Do not apply this call's result to our view of the actor: send its sequence and objects in full next time."""
        if call.op.appends and (known := self._known.get(call.seq)) is not None:
            known.stale = True
        self._sender.invalidate(*parts)

    def fork(self, seq: Sequence, twin: Sequence) -> None:
        """A twin of a sequence, as it is now, shares its cache."""
        known = self._known.get(seq)
        if known is not None:
            mine = self._known[twin] = known.twin(next(self._sids))
            self.say((RequestKind.FORK, known.sid, mine.sid, twin.seed))

    def release(self, seq: Sequence) -> None:
        """Forget a sequence."""
        known = self._known.pop(seq, None)
        if known is not None:
            self.say((RequestKind.RELEASE, known.sid))

    def say(self, *messages: tuple[Any, ...]) -> None:
        """Put messages into this turn's post."""
        self._outbox += messages
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        if forgotten := self._sender.take_collected():
            self._outbox.append((RequestKind.FORGET, forgotten))
        if dropped := self._exchange.handles.take_dropped(self.owner, self.life):
            self._outbox.append((RequestKind.DROP, dropped))
        if self._outbox and not self.lost.is_set():
            self._post()
        self._outbox = []

    def _post(self) -> None:
        name = self.card.name
        blob, faulty = pickled(self._outbox, name)
        for message, reason in faulty:
            log.error("%s at %s: %s", name, self.card.place, reason.message)
            self._fail(message, reason)
        self.bytes_posted += len(blob)
        try:
            self._channel.post(next(self._posts), blob)
        except RayActorError as error:
            self.reason = self.reason or error
            self._reader.cancel()
        except Exception as error:
            for message in self._outbox:
                self._fail(message, not_sent(len(blob), name, error))
            self.reason, self.blameless = self.reason or error, True  # the actor lacks a post for good
            self._reader.cancel()

    def _fail(self, message: tuple[Any, ...], error: TurnoutError) -> None:
        """A message was not sent: where it is a call, that fails, and what it was to bring is sent anew."""
        if message[0] != RequestKind.CALL or message[1] not in self._sent:
            return
        call, parts = self._sent.pop(message[1])
        self._calls.pop(call, None)
        if (known := self._known.get(call.seq)) is not None:
            known.appending -= call.op.appends
            known.stale = True
        self._disown(call, parts)
        if not call.future.done():
            call.future.set_exception(error)

    async def _read(self) -> None:
        try:
            async for blob in self._channel.replies():
                self.last_heard = time.monotonic()
                self.bytes_heard += len(blob)
                for message in pickle.loads(blob):
                    self._take(message)
        except Exception as error:
            full = store_full(error, self.card.node_ip)
            self.reason, self.blameless = self.reason or full or error, self.blameless or full is not None
        finally:
            self._exchange.remove(self)
            self.lost.set()

    def _take(self, message: tuple[Any, ...]) -> None:
        if message[0] == ReplyKind.ALIVE:
            self.load = message[1]
            self.say()  # what was forgotten since the last post
            return
        kind, number, packed, *grown = message
        call, parts = self._sent.pop(number)
        abandoned = call.future.done()
        try:
            value = self._apply(call, number, kind, packed, Grown(*grown), parts)
        except Exception as error:
            if not call.future.done():
                call.future.set_exception(error)
        else:
            if not call.future.done():
                call.future.set_result(value)
        if abandoned:
            self.abandoned_ended()

    def _apply(
        self, call: PendingCall, number: int, kind: int, packed: Any, grown: Grown, parts: tuple[Any, ...]
    ) -> Any:
        """Enter what a call changed, and make its result; what came of a call that was given up is only counted."""
        known, seq, card = self._known.get(call.seq), call.seq, self.card
        if known is not None:
            known.appending -= call.op.appends
        tokens = tuple(unpack_tokens(grown.tokens))
        if grown.counts:
            add_counts(seq.meter.of(card.name, card.num_parameters), grown.counts, len(tokens) * call.future.done())
        value: Any = None
        waited_for = self._calls.pop(call, None) is not None
        given = grown.states if waited_for else ()  # else copies may have been sent anew meanwhile
        states = {place: self._sender.receive(parts[place], state) for place, state in given}
        if kind == ReplyKind.DONE:  # also if it was cancelled: the tensors it names must be dropped
            value = unpack_result(call.op, packed, self._exchange.handles, tokens, states)
            if known is not None:
                keep(known.kept, number, call.op.kept(value))
        interrupted = kind == ReplyKind.FAILED and isinstance(packed, Interrupted)
        if waited_for and (interrupted or call.future.done()):
            self._disown(call, parts)
        if call.future.done():
            return None
        if interrupted:  # it is made again from its beginning
            raise packed
        if tokens:
            _append(call, known, tokens, card)
        if kind == ReplyKind.FAILED:
            self._sender.invalidate(*parts)
            raise packed
        return value

    async def close(self) -> None:
        """Stop reading; raises nothing."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


def _append(call: PendingCall, known: ReplicaView | None, tokens: tuple[Any, ...], card: ModelCard) -> None:
    """Append what an actor wrote to the call's sequence."""
    seq = call.seq
    if len(seq) != call.base or not all(seq.append(token, card.num_parameters) for token in tokens):
        what = f"{card.name} at {card.place} wrote {len(tokens)} tokens after {call.base}"
        raise TurnoutError(Code.INTERNAL, f"{what}; the answer is elsewhere")
    if known is not None:
        known.length = len(seq)
