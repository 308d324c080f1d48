"""Keeps one model actor alive: watches it, starts it again, and sends what it had not answered to its next life."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from actors.connection import ActorConnection, ConnectionGroup
from actors.group import Group
from actors.group_epoch import GroupBroken
from actors.incarnation import Incarnation, failure_of
from actors.protocol import ModelCard, PendingCall
from actors.quarantine import REQUEST, Quarantine, poison_request_error
from turnout.cluster_config import PlacementConfig
from turnout.errors import Code, Interrupted, TurnoutError

log = logging.getLogger(__name__)

WINDOW_S = 600.0  # in which restarts are counted
TICK_S = 1.0  # how often it is looked whether an actor is silent
PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # between starts that fail
MOST_TRIES = 3  # of a call that found the group broken
NOTICE_S = 5.0  # in which it is noticed that a rank has ended


class Start(Protocol):
    """Starts the processes of a member; `actors.incarnation.Launcher` does.

    Attributes:
        name: of the member, for people.
        owner: its number in the replica.
    """

    @property
    def name(self) -> str:
        """See `Start`."""
        ...

    @property
    def owner(self) -> int:
        """See `Start`."""
        ...

    async def start(self, number: int, vocab_size: int, first: ModelCard) -> Incarnation:
        """See `actors.incarnation.Launcher.start`."""
        ...


class Supervisor:
    """One member of a pool, through all its lives. Implements `actors.protocol.Supervisor`.

    A call is known here until it has its answer: what an actor had not answered when it ended goes to the next life.
    Whatever was under way when an actor ended is quarantined: see `Quarantine`.

    Args:
        launcher: starts its processes.
        life: the first one, loaded and begun.
        vocab_size: that the models of the pool have in common.
        placement: deadlines and limits.
        exchange: what the actors of the replica have in common.
        wake: called whenever something is asked of the member; sees to it that it speaks with its actor.

    Attributes:
        card: what the actor said of itself.
        connection: of the present life; None while there is none.
        over: why there will be no other life; None: there may.
    """

    def __init__(
        self,
        launcher: Start,
        life: Incarnation,
        vocab_size: int,
        placement: PlacementConfig,
        exchange: ConnectionGroup,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = launcher.name
        self.card: ModelCard = life.card
        self.connection: ActorConnection | None = None
        self.over: str | None = None
        self._launcher = launcher
        self._life = life
        self._vocab_size = vocab_size
        self._placement = placement
        self._exchange = exchange
        self._wake = wake
        self._group: Group | None = None
        self._calls: dict[PendingCall, str] = {}  # without an answer -> whose request they belong to
        self._sent: dict[PendingCall, None] = {}  # to the present life
        self._quarantine: Quarantine[PendingCall] = Quarantine()
        self._longest_wait_s = placement.start_timeout_s + placement.join_timeout_s
        self._restarts = _Restarts(launcher.name, placement.max_restarts)
        self._up = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._held_back = False  # whether a call waits until others are done

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._life.number

    @property
    def place(self) -> str:
        """Where the present life is, or the last one was."""
        return self._life.place

    def attach(self, group: Group | None) -> None:
        """Begin to speak with the actor, on the running event loop.

        Args:
            group: the transport group it belongs to; None: it is alone.
        """
        self._group = group
        self._open(self._life)
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {self.name}")

    async def present(self) -> Any:
        """See `actors.group.Member.present`."""
        await self._up.wait()
        if self.over is not None:
            raise Interrupted(self.over)
        return self._life.leader

    def tell(self, message: Callable[[ActorConnection], None]) -> None:
        """See `actors.protocol.Supervisor.tell`."""
        if self.connection is not None:
            message(self.connection)

    async def submit(self, call: PendingCall) -> Any:
        """See `actors.protocol.Supervisor.submit`."""
        self._wake()
        self.check()
        self._calls[call] = REQUEST.get()
        try:
            for tries in itertools.count(1):
                generation = self._group.generation if self._group is not None else None
                self._offer(call)
                try:
                    result = await call.future
                    self._quarantine.completed()
                    return result
                except GroupBroken:
                    if tries == MOST_TRIES or self._group is None:
                        raise
                    self._take_back(call)
                    await self._group.wait_recovered(generation, self._longest_wait_s)
                    call.renew()
                except Interrupted:
                    call.renew()  # it is still at work, should its process turn out to have ended
                    if tries == MOST_TRIES or not await self._ends():
                        raise
        except asyncio.CancelledError:
            if call in self._sent and self.connection is not None:
                self.connection.cancel(call)
            raise
        finally:
            del self._calls[call]
            self._quarantine.done(call)
            self._take_back(call)

    def _take_back(self, call: PendingCall) -> None:
        """A call is no longer at work: others may go now."""
        self._sent.pop(call, None)
        self._go_on()

    def _offer(self, call: PendingCall) -> None:
        """Send a call if it may go now; else it goes when it may."""
        if self.connection is None or call in self._sent:
            return
        if not len(self._quarantine) or self._quarantine.admits(call, self.connection.in_flight):
            self._sent[call] = None
            self.connection.send(call)
        else:
            self._held_back = True

    def _offer_all(self) -> None:
        self._held_back = False
        for call in sorted(self._calls, key=self._quarantine.tried):
            if not call.future.done():
                self._offer(call)

    def _go_on(self) -> None:
        """Send calls that were held back, as an operation has ended."""
        if self._held_back:
            self._offer_all()

    def check(self) -> None:
        """Look whether the member still has a life, or may have another one.

        Raises:
            Interrupted: it may not; says why.
        """
        if self.over is not None:
            raise Interrupted(self.over)

    async def close(self) -> None:
        """End the actor; calls without an answer fail."""
        self._end(f"{self.name} was closed", Code.CANCELLED)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        connection, self.connection = self.connection, None
        await self._life.stop()
        if connection is not None:
            await connection.close()

    def _open(self, life: Incarnation) -> None:
        """Speak with a life from now on, first of all about what the last one left."""
        self._life = life
        self.connection = ActorConnection(life.line, life.card, life.number, self._launcher.owner, self._exchange)
        self.connection.abandoned_ended = self._go_on
        self._up.set()
        self._offer_all()

    async def _watch(self) -> None:
        while self.over is None:
            assert self.connection is not None
            reason = await watched(self.connection, self._life, self._placement)
            log.warning("%s at %s is lost: %s", self.name, self.place, reason)
            await self._bury()
            try:
                async with asyncio.timeout(self._placement.start_timeout_s):
                    await self._revive(reason)
            except TimeoutError:
                self._end(f"{self.name} did not start again in {self._placement.start_timeout_s:g} s ({reason})")
            except TurnoutError as error:
                self._end(error.message)
            except Exception as error:  # the waiting callers get it
                log.exception("starting %s again failed", self.name)
                self._end(f"{self.name} could not be started again: {type(error).__name__}: {error}")

    async def _bury(self) -> None:
        """Nothing is said to this life any more; who may have ended it is found out."""
        connection, self.connection = self.connection, None
        self._up.clear()
        if self._group is not None:
            self._group.changed()
        self._life.kill()
        if connection is not None:
            await connection.close()
        self._sent.clear()
        if connection is None or connection.blameless:
            return
        at_work = connection.in_flight  # cancelled calls included
        for call, places in self._quarantine.died(at_work, self.place).items():
            if not call.future.done():
                call.future.set_exception(poison_request_error(self._calls[call], places))
        for call in at_work:
            if call not in self._calls:  # it is not sent again, and so can never be cleared
                self._quarantine.done(call)

    async def _revive(self, reason: str) -> None:
        """Start lives until one begins.

        Raises:
            TurnoutError: too many ended within ten minutes.
        """
        number = self._life.number
        for pause_s in itertools.chain([0.0], (min(PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in itertools.count())):
            await asyncio.sleep(pause_s)
            self._restarts.count(reason)
            number += 1
            started = time.monotonic()
            try:
                life = await self._launcher.start(number, self._vocab_size, self.card)
            except TurnoutError as error:
                reason = error.message
                log.warning("%s did not start: %s", self.name, reason)
                continue
            log.warning("%s is back at %s after %.1f s", self.name, life.place, time.monotonic() - started)
            self._open(life)
            return

    async def _ends(self) -> bool:
        """Whether the life that interrupted a call is over: one of its ranks has ended, which is noticed soon."""
        number, deadline = self._life.number, time.monotonic() + NOTICE_S
        while len(self._life.actors) > 1 and time.monotonic() < deadline:
            if self.connection is None or self._life.number != number:
                return True
            await asyncio.sleep(NOTICE_S / 100)
        return False

    def _end(self, why: str, code: Code | None = None) -> None:
        """Fail all waiting calls: there will be no other life."""
        if self.over is not None:
            return
        self.over = why
        self._up.set()
        for call in self._calls:
            if not call.future.done():
                call.future.set_exception(Interrupted(why) if code is None else TurnoutError(code, why))


class _Restarts:
    """Counts the starts of one member within ten minutes."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._starts: deque[float] = deque()

    def count(self, reason: str) -> None:
        """One more, because of this.

        Raises:
            TurnoutError: UNAVAILABLE: there were too many.
        """
        now = time.monotonic()
        while self._starts and self._starts[0] < now - WINDOW_S:
            self._starts.popleft()
        if len(self._starts) >= self._most:
            often = f"more than {self._most} times in ten minutes (placement.max_restarts)"
            raise TurnoutError(Code.UNAVAILABLE, f"{self._name} ended {often}; last: {reason}")
        self._starts.append(now)


async def watched(connection: ActorConnection, life: Incarnation, placement: PlacementConfig) -> str:
    """Wait until a life is lost.

    Silence is counted in time that this process was awake: if it was stopped itself, no actor is blamed. A process in
    which a forward hangs gives signs of life all the same, with how long that forward has been running.

    Returns:
        How it was noticed.
    """
    loop = asyncio.get_running_loop()
    lost = loop.create_task(connection.lost.wait())
    ranks = {asyncio.ensure_future(ref): f"rank {rank}" for rank, ref in enumerate(life.following, 1)}
    silence_s, forward_s = placement.silence_s, placement.forward_timeout_s
    tick_s = min(TICK_S, silence_s / 4)
    heard, quiet_s, last = connection.last_heard, 0.0, time.monotonic()
    try:
        while True:
            done, _ = await asyncio.wait([lost, *ranks], timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return _how(connection, ranks, done)
            now = time.monotonic()
            quiet_s = 0.0 if connection.last_heard != heard else quiet_s + min(now - last, 2 * tick_s)
            heard, last = connection.last_heard, now
            if quiet_s > silence_s:
                return f"no sign of life for {quiet_s:.1f} s (placement.silence_s)"
            if connection.load is not None and (working_s := connection.load.stats.working_s) > forward_s:
                return f"a forward has been running for {working_s:.1f} s (placement.forward_timeout_s)"
    finally:
        for each in (lost, *ranks):
            each.cancel()
        await asyncio.gather(lost, *ranks, return_exceptions=True)


def _how(connection: ActorConnection, ranks: dict[asyncio.Future[Any], str], done: set[asyncio.Future[Any]]) -> str:
    """What ended, and what Ray says of it."""
    for each, rank in ranks.items():
        if each in done:
            error = each.exception()
            return failure_of(error, rank).message if error is not None else f"{rank} has ended"
    return (
        failure_of(connection.reason, "its process").message if connection.reason is not None else "its replies ended"
    )
