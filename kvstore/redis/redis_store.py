"""The byte store in Redis: one class over every kind of address, with a total deadline on every call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvstore.base import StoreFault
from kvstore.redis.breaker import Breaker
from kvstore.redis.executables import version_in_info
from kvstore.redis.nodes import Address, is_embedded
from kvstore.redis.reading import Done, Place, Reading, Sizes
from kvstore.redis.resp import ErrorReply, Reply, command, per_key, set_once
from kvstore.redis.routes import Routes


class RedisStore:
    """A `ByteStore` in one Redis server, the master that sentinels name, or a cluster. Thread-safe.

    Nothing is connected before the first call. The request path uses its own connections (`resp`): redis-py's
    timeouts count for each receive and bound nothing in total.

    Args:
        address: from `parse_url`.
        connections: to each node, at most; each serves one call at a time.
        breaker_errors: errors in a row after which a node is left alone.
        breaker_cooldown_s: seconds until it is probed.

    Raises:
        TurnoutError: a TLS file is unusable.
        ValueError: a number is below what makes sense.
    """

    def __init__(
        self,
        address: Address,
        *,
        connections: int = 2,
        breaker_errors: int = 3,
        breaker_cooldown_s: float = 1.0,
    ) -> None:
        if connections < 1:
            raise ValueError("a store needs at least one connection")
        Breaker(breaker_errors, breaker_cooldown_s)

        def breaker(probe: Callable[[], bool]) -> Breaker:
            return Breaker(breaker_errors, breaker_cooldown_s, probe=probe)

        self.routes = Routes(address, connections, breaker)
        self._sizes = Sizes()
        self._embedded = is_embedded(address)

    def count_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Count the keys that are there, from the first on without a gap.

        An EXISTS for each key, pipelined: one EXISTS of all of them would count keys behind a gap, and a script
        would need the keys in one slot.
        """
        replies = self.routes.each(keys, per_key((b"EXISTS",), keys), deadline)
        count = 0
        for reply in replies:
            if reply != 1:
                if isinstance(reply, StoreFault) and count == 0:
                    raise reply
                break
            count += 1
        return count

    def read(self, keys: Sequence[bytes], place: Place, done: Done, ttl_ms: int, deadline: float) -> int:
        """Read values in order and make each live on; as `ByteStore.read`."""
        return Reading(self.routes, keys, place, done, ttl_ms, deadline, self._sizes).run()

    def write(self, key: bytes, parts: Sequence[memoryview | bytes], ttl_ms: int, deadline: float) -> bool:
        """Set a value unless the key is there; whether it was set."""
        return self.routes.one(key, set_once(key, parts, ttl_ms), deadline, may_be=(b"OK", None)) is not None

    def touch(self, keys: Sequence[bytes], ttl_ms: int | None, deadline: float) -> list[bool]:
        """Make keys live `ttl_ms` from now (None: for ever); for each, whether it was there."""
        if ttl_ms is not None:
            return _there(self.routes.each(keys, per_key((b"PEXPIRE",), keys, (ttl_ms,)), deadline))
        # PERSIST says 0 of a key that lives for ever already, so it does not count them.
        there = self.routes.each(keys, per_key((b"EXISTS",), keys), deadline)
        _there(self.routes.each(keys, per_key((b"PERSIST",), keys), deadline))
        return _there(there)

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """Remove keys; how many there were. Where not every node answered, that is a fault."""
        replies = self.routes.each(keys, per_key((b"UNLINK",), keys), deadline)
        for reply in replies:
            if isinstance(reply, StoreFault):
                raise reply
        return sum(reply for reply in replies if isinstance(reply, int))

    def script(self, text: str, keys: Sequence[bytes], args: Sequence[bytes | int | str], deadline: float) -> Any:
        """Run a small Lua script on the node that holds the keys, which lie in one slot; without keys, on any node.

        Returns:
            An int, bytes, None or a list of these.
        """
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        home = keys[0] if keys else b""
        reply = self.routes.one(home, [command("EVALSHA", digest, len(keys), *keys, *args)], deadline, allow="NOSCRIPT")
        if isinstance(reply, ErrorReply):
            reply = self.routes.one(home, [command("EVAL", text, len(keys), *keys, *args)], deadline)
        return reply

    def servers(self, deadline: float) -> list[str]:
        """Ask every node that is known for its product and version; one that does not say is left out."""
        places: dict[str, list[str]] = {}
        for endpoint in self.routes.topology.nodes():
            try:
                reply = self.routes.ask(endpoint, command("INFO", "SERVER"), deadline)
            except StoreFault:
                continue
            lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
            version = version_in_info(dict(line.split(":", 1) for line in lines if ":" in line))
            if version is not None:
                places.setdefault(str(version), []).append(str(endpoint))
        return [f"{name} ({'embedded' if self._embedded else ', '.join(each)})" for name, each in places.items()]

    def health(self) -> Literal["ok", "degraded", "off"]:
        """Return ok; degraded: some node's breaker is open; or off: nothing can be reached."""
        return self.routes.health()

    def reset_connections(self) -> None:
        """Replace all connections, after a value was found not to be that of its key.

        The server may be a command behind in its answers, which nothing but a seal can tell.
        """
        self.routes.reset_connections()

    def close(self) -> None:
        """Close connections; calls in progress end with a fault."""
        self.routes.close()


def _there(replies: Sequence[Reply | StoreFault]) -> list[bool]:
    """Tell which keys were there, by the replies of the nodes.

    Raises:
        StoreFault: no node answered.
    """
    faults = [reply for reply in replies if isinstance(reply, StoreFault)]
    if faults and len(faults) == len(replies):
        raise faults[0]
    return [reply == 1 for reply in replies]
