"""Values from Redis in order: asked for ahead, received straight into the caller's memory.

Values are requested on one connection per node, a few megabytes ahead of what has arrived. More would only lie in the
server's output buffers, which count as its memory and make it evict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvstore.base import StoreFault
from kvstore.redis.nodes import NodeAddress
from kvstore.redis.pool import Loan, Refused
from kvstore.redis.resp import Connection, ErrorReply, Reply, per_key
from kvstore.redis.routes import ASKING, CIRCLE, MAX_REDIRECTS, Routes
from kvstore.redis.topology import Redirect

WINDOW_BYTES = 4 << 20
MAX_AHEAD = 128

Place = Callable[[int, int], memoryview | None]
Done = Callable[[int], bool]


class Sizes:
    """Sizes of values seen so far: the largest decides how many are asked for ahead."""

    def __init__(self) -> None:
        self._largest = 0

    def saw(self, size: int) -> None:
        """Note the bytes of a value; one large value is forgotten after some hundred small ones."""
        self._largest = max(self._largest * 63 // 64, size)

    @property
    def ahead(self) -> int:
        """How many values may be under way; one while nothing is known."""
        if not self._largest:
            return 1
        return min(max(WINDOW_BYTES // self._largest, 1), MAX_AHEAD)


class NodeReads:
    """Reads of the values of one node.

    Args:
        loan: the node's connection.
        commands: that ask for the values, in order.
        sizes: of values.
    """

    def __init__(self, loan: Loan, commands: Sequence[bytes], sizes: Sizes) -> None:
        self.loan = loan
        self._unsent = deque(commands)
        self._sizes = sizes

    def ask_ahead(self, deadline: float) -> None:
        """Ask for more once half of what may be under way has come."""
        ahead, pending = self._sizes.ahead, self.loan.connection.pending
        if self._unsent and pending <= ahead // 2:
            count = min(len(self._unsent), ahead - pending)
            self.loan.connection.send([b"".join([self._unsent.popleft() for _ in range(count)])], count, deadline)

    def take(self, index: int, place: Place, deadline: float) -> Redirect | bool:
        """Receive the next value into its place; False: it is missing or not wanted.

        Raises:
            StoreFault: any.
        """
        self.ask_ahead(deadline)
        taken = _receive(self.loan.connection, self.loan.endpoint, index, place, self._sizes, deadline)
        if taken is True:
            # Before the caller works on the value: the next ones travel meanwhile.
            self.ask_ahead(deadline)
        return taken


def _receive(
    connection: Connection, endpoint: NodeAddress, index: int, place: Place, sizes: Sizes, deadline: float
) -> Redirect | bool:
    size = connection.bulk_size(deadline)
    if size is None:
        return False
    if isinstance(size, ErrorReply):
        redirect = Redirect.of(size, endpoint)
        if redirect is None:
            raise Refused(size)
        return redirect
    sizes.saw(size)
    view = place(index, size)
    if view is None:
        return False
    view = view.cast("B")
    if len(view) != size:
        raise ValueError(f"a place of {len(view)} bytes for a value of {size}")
    connection.bulk_into(view, deadline)
    return True


class Reading:
    """One ordered read over all nodes.

    Args:
        routes: to the nodes.
        keys: of the values.
        place: where each goes.
        done: hears of each that is complete.
        ttl_ms: life of what was read, in milliseconds.
        deadline: when to stop.
        sizes: of values.
    """

    def __init__(
        self,
        routes: Routes,
        keys: Sequence[bytes],
        place: Place,
        done: Done,
        ttl_ms: int,
        deadline: float,
        sizes: Sizes,
    ) -> None:
        self._routes = routes
        self._keys = keys
        self._commands = per_key((b"GETEX",), keys, (b"PX", ttl_ms))
        self._place = place
        self._done = done
        self._deadline = deadline
        self._sizes = sizes
        self._count = 0

    def run(self) -> int:
        """Read, and return the number of values, from the first on.

        Raises:
            StoreFault: before the first value.
        """
        redirects, at = 0, -1
        while True:
            end: Redirect | StoreFault | bool | None = self._run_nodes()
            if isinstance(end, Redirect):
                redirects, at = (redirects + 1 if self._count == at else 1), self._count
                end = self._redirected(end) if redirects <= MAX_REDIRECTS else StoreFault("broken", CIRCLE)
                if end is None:
                    continue
            if isinstance(end, StoreFault) and not self._count:
                raise end
            return self._count

    def _run_nodes(self) -> Redirect | StoreFault | bool:
        """Read on until something ends it: a redirect, a fault, or (False) the last value or the caller."""
        with ExitStack() as stack:
            reads = self._open_nodes(stack)
            while self._count < len(self._keys):
                read = reads[self._count]
                if isinstance(read, StoreFault):
                    return read
                try:
                    taken = read.take(self._count, self._place, self._deadline)
                except StoreFault as fault:
                    read.loan.end(fault)
                    return fault
                if taken is not True:
                    return taken
                if not self._complete():
                    # Perhaps it was not the value of its key: then what follows on this connection is not either.
                    read.loan.connection.discard()
                    return False
        return False

    def _open_nodes(self, stack: ExitStack) -> dict[int, NodeReads | StoreFault]:
        """Open the reads of each value still to read; every node starts to work at once."""
        todo = range(self._count, len(self._keys))
        unknown: list[Reply | StoreFault] = [None] * len(self._keys)
        groups = self._routes.grouped(todo, self._keys, unknown)
        reads: dict[int, NodeReads | StoreFault] = {
            i: known for i in todo if isinstance(known := unknown[i], StoreFault)
        }
        for endpoint, indexes in groups.items():
            found: NodeReads | StoreFault
            try:
                loan = self._routes.pool(endpoint).borrow(self._deadline)
            except StoreFault as fault:
                found = fault
            else:
                stack.callback(loan.end)
                found = NodeReads(loan, [self._commands[i] for i in indexes], self._sizes)
                try:
                    found.ask_ahead(self._deadline)
                except StoreFault as fault:
                    loan.end(fault)
                    found = fault
            for i in indexes:
                reads[i] = found
        return reads

    def _complete(self) -> bool:
        self._count += 1
        return self._done(self._count - 1)

    def _redirected(self, redirect: Redirect) -> StoreFault | bool | None:
        """Follow a redirect: what ends the reading, or None: read on."""
        endpoint = self._routes.follow(redirect)
        if not redirect.asking:
            return None
        # A slot is moving: its values are asked for one by one where it goes.
        try:
            with self._routes.pool(endpoint).borrow(self._deadline) as connection:
                connection.send([ASKING, self._commands[self._count]], 2, self._deadline)
                connection.reply(self._deadline)
                taken = _receive(connection, endpoint, self._count, self._place, self._sizes, self._deadline)
        except StoreFault as fault:
            return fault
        if isinstance(taken, Redirect):
            return None
        return None if taken and self._complete() else False
