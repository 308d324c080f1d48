"""How the members of a group meet: in a store that one of them opens, and by a deadline that names who is missing."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from engine.parallel.tcp_store import host_store, listen
from turnout.addresses import host_port
from turnout.errors import Code, TurnoutError

SHORTEST_S = 0.001
STORE_S = 300.0  # torch's own for what is not given a shorter time


def open_store(address: str) -> TCPStore:
    """A store for others to meet in, on a free port of this address only; it lasts as long as the object.

    Args:
        address: of this machine, as the others reach it.
    """
    return host_store(listen(address), STORE_S)


def reach_store(address: str, port: int, generation: int, timeout_s: float) -> TCPStore:
    """Connect to the store that another member has opened.

    Raises:
        TurnoutError: UNAVAILABLE: no process answers there.
    """
    deadline = time.monotonic() + timeout_s
    try:
        # The store is open before its address is passed on, so a refusal is final; torch's client would try again,
        # and sleep past the deadline.
        socket.create_connection((address, port), timeout_s).close()
        left_s = max(deadline - time.monotonic(), SHORTEST_S)
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=left_s))
    except (OSError, DistError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or f"no answer in {timeout_s:.0f} s"
        raise TurnoutError(
            Code.UNAVAILABLE,
            f"group {generation}: its meeting place at {host_port(address, port)} does not answer ({reason}); "
            "check that the member that opened it is alive, and that the nodes reach each other on all ports",
        ) from None


class Meeting:
    """The members of one generation of a group, as they arrive.

    Args:
        store: where they meet.
        generation: which one; members of another do not meet here.
        rank: of this member.
        world: members.
        timeout_s: until all must be there, in each of the steps.
        names: what the members are and where they run, by rank, for messages; empty: unknown.
    """

    def __init__(
        self, store: Store, generation: int, rank: int, world: int, timeout_s: float, names: Sequence[str] = ()
    ) -> None:
        self.store = PrefixStore(f"generation-{generation}", store)
        self.generation = generation
        self.rank = rank
        self.world = world
        self.deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._names = names

    @property
    def left_s(self) -> float:
        """Time until the deadline, never 0."""
        return max(self.deadline - time.monotonic(), SHORTEST_S)

    def reach(self, step: str, word: str) -> list[str]:
        """Say that this member has come to a step, and wait until all have.

        Args:
            step: its name.
            word: passed to the others.

        Returns:
            What each of them said, by rank.

        Raises:
            TurnoutError: UNAVAILABLE, naming the ranks that did not come.
        """
        keys = [f"{step}-{rank}" for rank in range(self.world)]
        try:
            self.store.set(keys[self.rank], word)
            self.store.wait(keys, timedelta(seconds=self.left_s))
            return [self.store.get(key).decode() for key in keys]
        except DistError:
            raise TurnoutError(Code.UNAVAILABLE, self._missing(step, keys)) from None

    def _missing(self, step: str, keys: list[str]) -> str:
        group = f"group {self.generation} of {self.world} members"
        try:
            late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except DistError:
            return f"{group}: its meeting place ended while rank {self.rank} was joining; it is to be formed again"
        ranks = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        named = f" ({'; '.join(self._names[rank] for rank in late)})" if self._names else ""
        return (
            f"{group}: {ranks}{named} did not come to the step {step!r} in {self._timeout_s:.0f} s; "
            "look at what these actors log, or raise placement.join_timeout_s"
        )
