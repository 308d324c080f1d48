"""Which node holds which key: one server, the master that sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvstore.base import FaultKind, StoreFault
from kvstore.redis.nodes import Address, Connector, NodeAddress
from kvstore.redis.resp import ErrorReply, Reply, command
from turnout.errors import invalid

# Longest look-up of the nodes, and shortest pause between two.
LOOKUP_S = 0.5
PAUSE_S = 1.0
DENIED = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})


@dataclass(frozen=True, slots=True)
class Redirect:
    """A cluster's answer that a key is elsewhere.

    Attributes:
        slot: of the key.
        endpoint: where it is.
        asking: only this once: the slot is moving there.
    """

    slot: int
    endpoint: NodeAddress
    asking: bool

    @classmethod
    def of(cls, reply: Reply, asked: NodeAddress) -> Redirect | None:
        """Read `MOVED slot host:port` and `ASK slot host:port`; None: it is something else."""
        if not isinstance(reply, ErrorReply) or reply.code not in {"MOVED", "ASK"}:
            return None
        words = reply.text.split(" ")
        if len(words) != 3 or not words[1].isdigit() or int(words[1]) >= REDIS_CLUSTER_HASH_SLOTS:
            return None
        host, _, port = words[2].rpartition(":")
        if not port.isdigit():
            return None
        # A node that does not know its own name means the one that was asked.
        return cls(int(words[1]), NodeAddress(host or asked.host, int(port)), words[0] == "ASK")


class Topology:
    """The nodes, by key. Thread-safe; the methods that note changes return at once.

    The base class is one server, which never moves.

    Args:
        endpoints: the known nodes.
    """

    def __init__(self, endpoints: Sequence[NodeAddress] = ()) -> None:
        self._endpoints = tuple(endpoints)

    def nodes(self) -> list[NodeAddress]:
        """List the nodes known now; none before the first look-up succeeded."""
        return list(self._endpoints)

    def node_of(self, key: bytes) -> NodeAddress:
        """Return the node of a key.

        Raises:
            StoreFault: unreachable: no server could say where the nodes are.
        """
        return self._endpoints[0]

    def moved(self, redirect: Redirect) -> None:
        """Note that a slot is elsewhere for good."""

    def failed(self, endpoint: NodeAddress) -> None:
        """Note that a node failed: another may have taken its place."""


class _Lookup:
    """Look-up of the nodes, run at most once at a time and once per `PAUSE_S`."""

    def __init__(self, find: Callable[[], None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._next_at = 0.0

    def now(self) -> None:
        """Run it here, if it may run; it raises what it meets."""
        if self._may_run():
            try:
                self._find()
            finally:
                self._lock.release()

    def in_background(self) -> None:
        """Run it in a thread of its own, if it may run."""
        if self._may_run():
            threading.Thread(target=self._run_in_background, name="kvstore-lookup", daemon=True).start()

    def _may_run(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        now = time.monotonic()
        if now < self._next_at:
            self._lock.release()
            return False
        self._next_at = now + PAUSE_S
        return True

    def _run_in_background(self) -> None:
        try:
            self._find()
        except StoreFault:
            return  # what was known stays; the next failure asks again
        finally:
            self._lock.release()


class SentinelMaster(Topology):
    """The master of a service, asked from the sentinels, and again whenever it fails.

    Sentinels often have no password where the servers have one, and refuse one then: they get it when they ask.

    Args:
        address: of the sentinels.
        connector: for the TLS settings.
    """

    def __init__(self, address: Address, connector: Connector) -> None:
        super().__init__()
        self._service = address.service
        self._who = address.access.who
        options: dict[str, Any] = {
            "socket_timeout": LOOKUP_S,
            "socket_connect_timeout": LOOKUP_S,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **connector.tls_options(),
        }
        listed = [(endpoint.host, endpoint.port) for endpoint in address.endpoints]
        sentinel: Any = Sentinel  # not typed by redis-py
        known = {"username": address.access.user, "password": address.access.password}
        ways = [options, *([options | known] if address.access.password is not None else [])]
        self._ways = [sentinel(listed, sentinel_kwargs=each) for each in ways]
        self._lookup = _Lookup(self._find)

    def node_of(self, key: bytes) -> NodeAddress:
        """Return the master, whatever the key."""
        if not self._endpoints:
            self._lookup.now()
        if not self._endpoints:
            raise StoreFault("unreachable", f"no sentinel knows the master of {self._service!r} yet")
        return self._endpoints[0]

    def failed(self, endpoint: NodeAddress) -> None:
        """Look up the nodes again, in the background."""
        self._lookup.in_background()

    def _find(self) -> None:
        denied: Exception | None = None
        for sentinels in self._ways:
            try:
                host, port = sentinels.discover_master(self._service)
            except redis.RedisError as error:
                if not _is_denial(error):
                    message = f"the sentinels name no master of {self._service!r}: {error}"
                    raise StoreFault("unreachable", message) from error
                denied = error
            else:
                self._endpoints = (NodeAddress(host, int(port)),)
                return
            finally:
                for each in sentinels.sentinels:
                    each.close()
        raise StoreFault("refused", f"the sentinels refuse {self._who}: {denied}") from denied


def _is_denial(error: redis.RedisError) -> bool:
    """Tell whether a sentinel asked for a password or a right; errors of several of them come as one text."""
    return isinstance(error, redis.exceptions.NoPermissionError) or "AuthenticationError" in str(error)


class Cluster(Topology):
    """The nodes of a cluster by slot.

    `redis.RedisCluster` is not used: it cannot be made while no node answers, needs the right to COMMAND, and looks up
    the slots in the caller's thread. With it one dead node fails a pipeline for all nodes, and one that hangs held a
    pipeline with a socket timeout of 0.5 s for 7 s (1 s without its retries); here a deadline of 0.5 s holds.

    Args:
        seeds: some of the nodes.
        ask: send one command to a node, by a deadline; its reply.
    """

    def __init__(self, seeds: Sequence[NodeAddress], ask: Callable[[NodeAddress, bytes, float], Reply]) -> None:
        super().__init__()
        self._seeds = tuple(seeds)
        self._ask = ask
        self._slots: list[NodeAddress | None] = []
        self._lookup = _Lookup(self._find)

    def nodes(self) -> list[NodeAddress]:
        """List the nodes that hold slots."""
        return sorted({endpoint for endpoint in self._slots if endpoint is not None}, key=str)

    def node_of(self, key: bytes) -> NodeAddress:
        """Return the node of the key's slot."""
        if not self._slots:
            self._lookup.now()
        slots = self._slots
        endpoint = slots[key_slot(key)] if slots else None
        if endpoint is None:
            self._lookup.in_background()
            raise StoreFault("unreachable", "no node of the cluster is known to hold this slot")
        return endpoint

    def moved(self, redirect: Redirect) -> None:
        """Note it, and look up in the background what else has moved."""
        if self._slots:
            self._slots[redirect.slot] = redirect.endpoint
        self._lookup.in_background()

    def failed(self, endpoint: NodeAddress) -> None:
        """Look up the nodes again, in the background."""
        self._lookup.in_background()

    def _find(self) -> None:
        """Ask nodes one after another until one answers."""
        last: StoreFault | None = None
        for endpoint in dict.fromkeys((*self.nodes(), *self._seeds)):
            try:
                reply = self._ask(endpoint, command("CLUSTER", "SLOTS"), time.monotonic() + LOOKUP_S)
            except StoreFault as fault:
                last = _graver(last, fault)
                continue
            if isinstance(reply, ErrorReply) and "cluster support disabled" in reply.text:
                raise StoreFault("refused", f"{endpoint} is no node of a cluster; write redis:// instead")
            if isinstance(reply, ErrorReply) and reply.code in DENIED:
                last = StoreFault("refused", f"{endpoint}: {reply.text}")
            slots = _slots_of(reply, endpoint)
            if slots:
                self._slots = slots
                return
        kind: FaultKind = "refused" if last is not None and last.kind == "refused" else "unreachable"
        raise StoreFault(kind, f"no node of the cluster says who holds the slots: {last}")


def _graver(one: StoreFault | None, other: StoreFault) -> StoreFault:
    """Return that of two faults which needs an operator."""
    return one if one is not None and one.kind == "refused" else other


def _slots_of(reply: Reply, asked: NodeAddress) -> list[NodeAddress | None]:
    """Read CLUSTER SLOTS: rows of first slot, last slot, master, replicas; empty: not readable or nothing covered."""
    slots: list[NodeAddress | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    rows: Any = reply if isinstance(reply, list) else []
    try:
        for first, last, (host, port, *_), *_ in rows:
            endpoint = NodeAddress((host or b"").decode() or asked.host, int(port))
            if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                return []
            slots[first : last + 1] = [endpoint] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError):
        return []
    return slots if any(slots) else []


def learn(address: Address, connector: Connector, ask: Callable[[NodeAddress, bytes, float], Reply]) -> Topology:
    """Make the topology of an address.

    Raises:
        TurnoutError: the address does not fit its kind.
    """
    if address.kind == "cluster":
        return Cluster(address.endpoints, ask)
    if address.kind == "sentinel":
        return SentinelMaster(address, connector)
    if len(address.endpoints) != 1:
        raise invalid("kvstore.url", "names several servers; write redis+cluster:// or redis+sentinel://")
    return Topology(address.endpoints)
