"""Commands to the right nodes: one key at a time or many at once, following a cluster's redirects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal

from kvstore.base import StoreFault
from kvstore.redis.breaker import Breaker
from kvstore.redis.nodes import Address, Connector, NodeAddress
from kvstore.redis.pool import Loan, Pool, Refused
from kvstore.redis.resp import ErrorReply, Reply, command
from kvstore.redis.topology import Redirect, learn

# A key that is sent on more often than this is chased in a circle.
MAX_REDIRECTS = 5
ASKING = command("ASKING")
CIRCLE = "the cluster sends a key from node to node"


class Routes:
    """The nodes of an address: who holds which key, and the connections to each. Thread-safe.

    Args:
        address: from the URL.
        connections: how many at most to each node.
        breaker: makes a node's breaker from its probe.

    Raises:
        TurnoutError: a TLS file is unusable.
    """

    def __init__(self, address: Address, connections: int, breaker: Callable[[Callable[[], bool]], Breaker]) -> None:
        self._connector = Connector(address.access)
        self._connections = connections
        self._breaker = breaker
        self._lock = threading.Lock()
        self._pools: dict[NodeAddress, Pool] = {}
        self._closed = False
        self._lost = False
        self.topology = learn(address, self._connector, self.ask)

    def pool(self, endpoint: NodeAddress) -> Pool:
        """Return the connections to a node."""
        with self._lock:
            pool = self._pools.get(endpoint)
            if pool is None:
                connect, failed = self._connector, self.topology.failed
                pool = Pool(endpoint, connect, self._connections, self._breaker, failed)
                self._pools[endpoint] = pool
                if self._closed:
                    pool.close()
            return pool

    @property
    def pools(self) -> list[Pool]:
        """The pools of all nodes that were used."""
        with self._lock:
            return list(self._pools.values())

    def node_of(self, key: bytes) -> NodeAddress:
        """Return the node of a key.

        Raises:
            StoreFault: unreachable or refused: no server says where the nodes are.
        """
        try:
            endpoint = self.topology.node_of(key)
        except StoreFault:
            self._lost = True
            raise
        self._lost = False
        return endpoint

    def one(
        self,
        key: bytes,
        parts: Sequence[bytes | memoryview],
        deadline: float,
        *,
        allow: str = "",
        may_be: tuple[Reply, ...] = (),
    ) -> Reply:
        """Send one command to the node of its key, and follow where that node points.

        Args:
            key: by which the node is found.
            parts: of the command.
            deadline: for all of it.
            allow: an error of this code is a reply, not a fault.
            may_be: what the command is answered by; empty: anything.

        Raises:
            StoreFault: any.
        """
        endpoint, asking = self.node_of(key), False
        for _ in range(MAX_REDIRECTS):
            with self.pool(endpoint).borrow(deadline) as connection:
                connection.send([ASKING, *parts] if asking else parts, 1 + asking, deadline)
                reply = connection.replies(1 + asking, deadline)[-1]
                redirect = Redirect.of(reply, endpoint)
                if redirect is None:
                    if isinstance(reply, ErrorReply) and reply.code != allow:
                        raise Refused(reply)
                    if may_be and reply not in may_be:
                        connection.discard()
                        raise StoreFault("broken", "a reply that this command never gets")
                    return reply
            endpoint, asking = self.follow(redirect), redirect.asking
        raise StoreFault("broken", CIRCLE)

    def follow(self, redirect: Redirect) -> NodeAddress:
        """Return the node to which a redirect points, and note a move for good."""
        if not redirect.asking:
            self.topology.moved(redirect)
        return redirect.endpoint

    def each(self, keys: Sequence[bytes], commands: Sequence[bytes], deadline: float) -> list[Reply | StoreFault]:
        """Send a command that is answered by a number for each key, in one round trip per node.

        Returns:
            Each key's reply, or the fault that stands for it (of its node, or an error reply).
        """
        results: list[Reply | StoreFault] = [StoreFault("broken", CIRCLE)] * len(keys)
        todo = list(range(len(keys)))
        for _ in range(MAX_REDIRECTS):
            if not todo:
                break
            todo = self._round(todo, keys, commands, results, deadline)
        return results

    def health(self) -> Literal["ok", "degraded", "off"]:
        """Return ok; degraded: some breaker is not closed, or a key has no node; or off: there is no node to call."""
        known = {self.pool(endpoint) for endpoint in self.topology.nodes()}
        for pool in known:
            pool.breaker.wake()
        states = [pool.breaker.state for pool in known]
        if self._closed or (states and states.count("open") == len(states)) or (self._lost and not states):
            return "off"
        return "degraded" if self._lost or any(state != "closed" for state in states) else "ok"

    def reset_connections(self) -> None:
        """Use none of the present connections again."""
        for pool in self.pools:
            pool.reset_connections()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
        for pool in self.pools:
            pool.close()

    def ask(self, endpoint: NodeAddress, raw: bytes, deadline: float) -> Reply:
        """Send one command to a node; an error reply is returned.

        Raises:
            StoreFault: any, but not for what the node says.
        """
        with self.pool(endpoint).borrow(deadline) as connection:
            connection.send([raw], 1, deadline)
            return connection.reply(deadline)

    def _round(
        self,
        todo: list[int],
        keys: Sequence[bytes],
        commands: Sequence[bytes],
        results: list[Reply | StoreFault],
        deadline: float,
    ) -> list[int]:
        """Send to every node at once, then collect; return the indexes of keys that have moved."""
        groups = self.grouped(todo, keys, results)
        redirects: dict[int, Redirect] = {}
        with ExitStack() as stack:
            loans: list[Loan] = []
            for endpoint, indexes in groups.items():
                try:
                    loan = self.pool(endpoint).borrow(deadline)
                except StoreFault as fault:
                    _fill(results, indexes, fault)
                    continue
                stack.callback(loan.end)
                try:
                    loan.connection.send([b"".join([commands[i] for i in indexes])], len(indexes), deadline)
                    loans.append(loan)
                except StoreFault as fault:
                    _fill(results, indexes, fault)
                    loan.end(fault)
            for loan in loans:
                redirects |= self._collect(loan, groups[loan.endpoint], results, deadline)
        for i, redirect in redirects.items():
            self.follow(redirect)
            if redirect.asking:  # a key that is just moving is asked for on its own
                try:
                    results[i] = self.one(keys[i], [commands[i]], deadline)
                except StoreFault as fault:
                    results[i] = fault
        return [i for i, redirect in redirects.items() if not redirect.asking]

    def grouped(
        self, indexes: Sequence[int], keys: Sequence[bytes], results: list[Reply | StoreFault]
    ) -> dict[NodeAddress, list[int]]:
        """Group indexes by node, the nodes always in the same order.

        Two calls that hold one node's last connection each, and wait for the other's, cannot meet this way. A key
        whose node is unknown gets its fault in `results`.
        """
        groups: dict[NodeAddress, list[int]] = {}
        last: NodeAddress | None = None
        group: list[int] = []
        for i in indexes:
            try:
                endpoint = self.node_of(keys[i])
            except StoreFault as fault:
                results[i] = fault
                continue
            if endpoint is not last:
                last, group = endpoint, groups.setdefault(endpoint, [])
            group.append(i)
        return dict(sorted(groups.items(), key=lambda item: str(item[0])))

    def _collect(
        self, loan: Loan, indexes: list[int], results: list[Reply | StoreFault], deadline: float
    ) -> dict[int, Redirect]:
        """Take a node's replies; return the redirects among them by index."""
        redirects: dict[int, Redirect] = {}
        try:
            replies = loan.connection.replies(len(indexes), deadline)
        except StoreFault as fault:
            _fill(results, indexes, fault)
            loan.end(fault)
            return redirects
        wrong: StoreFault | None = None
        for i, reply in zip(indexes, replies, strict=True):
            if isinstance(reply, int):
                results[i] = reply
            elif (redirect := Redirect.of(reply, loan.endpoint)) is not None:
                redirects[i] = redirect
            elif isinstance(reply, ErrorReply):
                results[i] = wrong = Refused(reply)
            else:
                # It is another command's reply: every later one would be too.
                loan.connection.discard()
                results[i] = wrong = StoreFault("broken", "a reply that is no number")
        loan.end(wrong)
        return redirects


def _fill(results: list[Reply | StoreFault], indexes: Sequence[int], fault: StoreFault) -> None:
    for i in indexes:
        results[i] = fault
