"""The connections to one node, lent one at a time, and the breaker that hears how each use went."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.base import StoreFault
from kvstore.redis.breaker import Breaker
from kvstore.redis.resp import Connection, ErrorReply, command
from kvstore.redis.streams import remaining

# The node is up, and only this command or key was not for it: no reason to stop reading from it.
HARMLESS = frozenset({"NOSCRIPT", "MOVED", "ASK", "TRYAGAIN", "OOM", "MISCONF", "NOREPLICAS"})
# A probe carries more than a packet, so that a server that dribbles fails it.
PROBE = bytes(range(256)) * 64
PROBE_S = 0.5


class Refused(StoreFault):
    """An error reply, as a fault.

    Args:
        reply: what the server said.
    """

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__("refused", f"the server said {reply.text}")
        self.reply = reply


@dataclass(slots=True)
class Loan:
    """A connection in use.

    Attributes:
        connection: to the node.
        era: what the breaker gave.
    """

    connection: Connection
    era: int


class Pool:
    """At most `size` connections to a node, opened when needed. Thread-safe; a forked child opens its own.

    Args:
        connect: opens one, by a deadline.
        size: how many at most.
        breaker: its settings: a function from the probe to a breaker.
    """

    def __init__(
        self,
        connect: Callable[[float], Connection],
        size: int,
        breaker: Callable[[Callable[[], bool]], Breaker],
    ) -> None:
        self._connect = connect
        self._size = size
        self.breaker = breaker(self._probe)
        self._free = threading.Condition()
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()
        self._opening = 0
        self._closed = False
        self._process = os.getpid()

    def take(self, deadline: float) -> Loan:
        """A connection, open and clean; `give` it back.

        Raises:
            StoreFault: open (at once); late when all stay in use; whatever opening one meets.
        """
        era = self.breaker.admit()
        try:
            remaining(deadline)
            connection = self._claim(deadline)
        except BaseException:
            self.breaker.settle(era, None)  # a caller without time or our own queue says nothing about the node
            raise
        if connection is not None:
            return Loan(connection, era)
        fault: BaseException | None = None
        try:
            connection = self._connect(deadline)
        except BaseException as error:
            fault = error
            raise
        finally:
            with self._free:
                self._opening -= 1
                if connection is not None and not self._closed:
                    self._lent.add(connection)
                self._free.notify()
            if fault is not None:
                self.breaker.settle(era, _outcome(fault))
        if self._closed:
            connection.close()
            self.breaker.settle(era, None)
            raise StoreFault("unreachable", "the store is closed")
        return Loan(connection, era)

    def give(self, loan: Loan, fault: BaseException | None = None) -> None:
        """End a loan; `fault` is what went wrong on this node."""
        connection = loan.connection
        with self._free:
            self._lent.discard(connection)
            keep = connection.reusable and not self._closed
            if keep:
                self._idle.append(connection)
            self._free.notify()
        if not keep:
            connection.close()
        self.breaker.settle(loan.era, _outcome(fault))

    def reset_connections(self) -> None:
        """Use none of the present connections again; calls in progress end as they would."""
        with self._free:
            idle, self._idle = self._idle, []
            for connection in self._lent:
                connection.discard()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close all; calls in progress end with a fault."""
        with self._free:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._lent:
                connection.shut()
            self._free.notify_all()
        for connection in idle:
            connection.close()

    def _claim(self, deadline: float) -> Connection | None:
        """An idle connection, or None and the right to open one."""
        with self._free:
            if self._process != os.getpid():
                # The parent uses these; closing our copies of the descriptors does not disturb it.
                self._process = os.getpid()
                while self._idle:
                    self._idle.pop().close()
                self._lent.clear()
                self._opening = 0
            while not self._closed:
                while self._idle:
                    connection = self._idle.pop()
                    # The server may have gone since, or have sent what nobody asked for.
                    if connection.quiet():
                        self._lent.add(connection)
                        return connection
                    connection.close()
                if len(self._lent) + self._opening < self._size:
                    self._opening += 1
                    return None
                self._free.wait(remaining(deadline))
        raise StoreFault("unreachable", "the store is closed")

    def _probe(self) -> bool:
        """Whether a new connection carries some kilobytes there and back."""
        if self._closed:
            return False
        deadline = time.monotonic() + PROBE_S
        connection = self._connect(deadline)
        try:
            connection.send([command(b"ECHO", PROBE)], 1, deadline)
            reply = connection.reply(deadline)
        finally:
            connection.close()
        # A user without the right to ECHO is told so by a server that is up.
        return reply == PROBE or (isinstance(reply, ErrorReply) and reply.code == "NOPERM")


def _outcome(fault: BaseException | None) -> bool | None:
    """How a use ended, for the breaker: every fault counts that is the node's."""
    if fault is None or (isinstance(fault, Refused) and fault.reply.code in HARMLESS):
        return True
    return False if isinstance(fault, StoreFault) else None
