"""The connections to one node, lent one at a time, and the node's breaker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from kvstore.base import StoreFault
from kvstore.redis.breaker import Breaker
from kvstore.redis.nodes import NodeAddress
from kvstore.redis.resp import Connection, ErrorReply, command
from kvstore.redis.streams import remaining

# The node is up, and only this command or key was not for it: no reason to stop reading from it.
HARMLESS = frozenset({"NOSCRIPT", "MOVED", "ASK", "TRYAGAIN", "OOM", "MISCONF", "NOREPLICAS"})
# A probe carries more than a packet, so that a server that dribbles fails it.
PROBE = bytes(range(256)) * 64
PROBE_S = 0.5
CLOSED = "the store is closed"


class Refused(StoreFault):
    """An error reply, as a fault.

    Args:
        reply: what the server said.
    """

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__("refused", f"the server said {reply.text}")
        self.reply = reply


class Loan:
    """A node's connection, borrowed for one exchange and returned once.

    As a context manager it gives the connection, and takes what is raised meanwhile for that node's fault.

    Args:
        pool: to which it is returned.
        connection: to the node.
        era: of the node's breaker.
    """

    def __init__(self, pool: Pool, connection: Connection, era: int) -> None:
        self.endpoint = pool.endpoint
        self.connection = connection
        self._era = era
        self._pool: Pool | None = pool

    def end(self, fault: BaseException | None = None) -> None:
        """Return the connection, with the error of this node if there was one; later calls do nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.take_back(self.connection, self._era, fault)

    def __enter__(self) -> Connection:
        return self.connection

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)


class Pool:
    """At most `size` connections to a node, opened when needed. Thread-safe; a forked child opens its own.

    redis-py's pools have one timeout for all callers and connect within `get_connection`, where AUTH and SELECT wait
    for as long as the server sends a byte now and then: neither takes the deadline of a call.

    Args:
        endpoint: of the node.
        connect: opens a connection, by a deadline.
        size: maximum number of connections.
        breaker: makes the node's breaker from its probe.
        failed: called with the endpoint after each error of the node.
    """

    def __init__(
        self,
        endpoint: NodeAddress,
        connect: Callable[[NodeAddress, float], Connection],
        size: int,
        breaker: Callable[[Callable[[], bool]], Breaker],
        failed: Callable[[NodeAddress], None],
    ) -> None:
        self.endpoint = endpoint
        self._connect = connect
        self._size = size
        self._failed = failed
        self.breaker = breaker(self._probe)
        self._free = threading.Condition()
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()
        self._opening = 0
        self._closed = False
        self._process = os.getpid()

    @property
    def idle(self) -> tuple[Connection, ...]:
        """Connections that are open and not borrowed."""
        return tuple(self._idle)

    @property
    def in_use(self) -> int:
        """Number of borrowed connections."""
        return len(self._lent)

    def borrow(self, deadline: float) -> Loan:
        """Borrow a connection, open and clean.

        Raises:
            StoreFault: open (at once); late when all stay in use; any error of opening one.
        """
        try:
            era = self.breaker.admit()
            return Loan(self, self._take(era, deadline), era)
        except StoreFault as fault:
            self._note(fault)
            raise

    def _take(self, era: int, deadline: float) -> Connection:
        try:
            remaining(deadline)
            connection = self._claim(deadline)
        except BaseException:
            self.breaker.settle(era, None)  # a caller without time or our own queue says nothing about the node
            raise
        if connection is not None:
            return connection
        try:
            connection = self._connect(self.endpoint, deadline)
        except BaseException as error:
            self.breaker.settle(era, _outcome(error))
            raise
        finally:
            with self._free:
                self._opening -= 1
                if connection is not None and not self._closed:
                    self._lent.add(connection)
                self._free.notify()
        if self._closed:
            connection.close()
            self.breaker.settle(era, None)
            raise StoreFault("unreachable", CLOSED)
        return connection

    def take_back(self, connection: Connection, era: int, fault: BaseException | None) -> None:
        """End a loan."""
        with self._free:
            self._lent.discard(connection)
            keep = connection.reusable and not self._closed
            if keep:
                self._idle.append(connection)
            self._free.notify()
        if not keep:
            connection.close()
        self.breaker.settle(era, _outcome(fault))
        self._note(fault)

    def _note(self, fault: BaseException | None) -> None:
        if _outcome(fault) is False:
            self._failed(self.endpoint)

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
        """Return an idle connection, or None and the right to open one."""
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
                    # The server may have gone since, or have sent something unasked.
                    if connection.quiet():
                        self._lent.add(connection)
                        return connection
                    connection.close()
                if len(self._lent) + self._opening < self._size:
                    self._opening += 1
                    return None
                self._free.wait(remaining(deadline))
        raise StoreFault("unreachable", CLOSED)

    def _probe(self) -> bool:
        """Tell whether a new connection carries some kilobytes there and back."""
        if self._closed:
            return False
        deadline = time.monotonic() + PROBE_S
        connection = self._connect(self.endpoint, deadline)
        try:
            connection.send([command(b"ECHO", PROBE)], 1, deadline)
            reply = connection.reply(deadline)
        finally:
            connection.close()
        # A server that is up refuses ECHO to a user without that right.
        return reply == PROBE or (isinstance(reply, ErrorReply) and reply.code == "NOPERM")


def _outcome(fault: BaseException | None) -> bool | None:
    """Judge a use, for the breaker: every error of the node counts."""
    if fault is None or (isinstance(fault, Refused) and fault.reply.code in HARMLESS):
        return True
    return False if isinstance(fault, StoreFault) else None
