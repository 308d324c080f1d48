"""The transport group of a replica's actors: formed when they start, and formed anew when one of them is replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from ray.exceptions import RayTaskError

from actors.incarnation import failure_of
from turnout.errors import Code, Interrupted, TurnoutError

log = logging.getLogger(__name__)

MOST_TRIES = 3  # to form a group of members that are all alive
AGAIN_S = 0.5
GRACE_S = 5.0
REMEDY = "look at what it logs, or raise placement.join_timeout_s"


class Member(Protocol):
    """Member of the group; its index among the members is its rank."""

    name: str

    @property
    def place(self) -> str:
        """Node and process, for people."""
        ...

    async def present(self) -> Any:
        """The handle of its actor; where it is being replaced, of the next one, as soon as that is loaded.

        Raises:
            Interrupted: there will be no next one.
        """
        ...


async def join(actors: Sequence[Any], names: Sequence[str], generation: int, timeout_s: float) -> None:
    """Let actors form a generation of their group: all of them, or it fails as soon as one does.

    Args:
        actors: handles, by rank.
        names: what they are called in messages, and where they run, by rank.
        generation: larger than those before.
        timeout_s: time that all have together.

    Raises:
        TurnoutError: UNAVAILABLE, naming the ranks that did not come.
    """
    ranks = [f"rank {rank} of group {generation}, {name}," for rank, name in enumerate(names)]
    try:
        async with asyncio.timeout(timeout_s + GRACE_S):  # the members' own deadlines come first, and say more
            address, port = await actors[0].listen.remote()
    except TimeoutError:
        raise TurnoutError(Code.UNAVAILABLE, f"{ranks[0]} did not answer in {timeout_s:g} s: {REMEDY}") from None
    except Exception as error:
        raise failure_of(error, ranks[0]) from None
    joining = {
        asyncio.ensure_future(
            actor.join.remote(generation, rank, len(actors), address, port, timeout_s, list(names))
        ): ranks[rank]
        for rank, actor in enumerate(actors)
    }
    try:
        done, left = await asyncio.wait(joining, timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_EXCEPTION)
        for each in done:
            if (failed := each.exception()) is not None:
                raise _refusal(failed, joining[each])
        if left:
            late = " ".join(joining[each] for each in left)
            raise TurnoutError(Code.UNAVAILABLE, f"{late} did not answer in {timeout_s:g} s: {REMEDY}")
    finally:
        for each in joining:
            each.cancel()


def _refusal(failed: BaseException, who: str) -> TurnoutError:
    """What a member says of the others comes first: it is seldom its own fault."""
    cause = failed.cause if isinstance(failed, RayTaskError) else failed
    if isinstance(cause, TurnoutError):
        return TurnoutError(cause.code, f"{cause.message} (says {who.rstrip(',')})", cause.field)
    return failure_of(failed, who)


class Group:
    """Keeps the members of a replica in one group, whatever becomes of single ones.

    Args:
        pool: the pool's name, for messages.
        members: by rank.
        timeout_s: time that all have to join.
        generation: in which they are already.

    Attributes:
        generation: the one that all members are in; None while they are not.
        over: why there will be no other; None: there may.
    """

    def __init__(self, pool: str, members: Sequence[Member], timeout_s: float, generation: int) -> None:
        self.generation: int | None = generation
        self.over: str | None = None
        self._pool = pool
        self._members = members
        self._timeout_s = timeout_s
        self._last = generation
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"group of {pool}")

    def changed(self) -> None:
        """A member has gone: no transfer succeeds until all have met again."""
        self.generation = None
        self._settled.clear()
        self._changed.set()

    async def wait_recovered(self, broken: int | None, timeout_s: float) -> None:
        """Wait for the generation after one that broke.

        Args:
            broken: the one that was in use; None: none was.
            timeout_s: most that is waited.

        Raises:
            Interrupted: there is none.
        """
        if broken is not None and broken == self.generation:
            log.warning("pool %s: group %d broke while all members live; it is formed anew", self._pool, broken)
            self.changed()
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            message = f"pool {self._pool!r}: its actors did not form a group again in {timeout_s:g} s"
            raise Interrupted(message) from None
        if self.over is not None:
            raise Interrupted(self.over)

    async def close(self) -> None:
        """Form no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        tries = 0
        while self.over is None:
            await self._changed.wait()
            self._changed.clear()
            try:
                actors = [await member.present() for member in self._members]
                if self._changed.is_set():
                    continue
                self._last += 1
                names = [f"{member.name} at {member.place}" for member in self._members]
                await join(actors, names, self._last, self._timeout_s)
            except Interrupted as error:
                self._end(error.message)
            except TurnoutError as error:
                log.warning("pool %s: %s", self._pool, error)
                tries = 0 if self._changed.is_set() else tries + 1
                if tries == MOST_TRIES:
                    self._end(f"pool {self._pool!r}: its actors live and cannot form a group: {error}")
                else:
                    await asyncio.sleep(AGAIN_S)
                    self._changed.set()
            except Exception as error:  # the waiting callers get it
                log.exception("pool %s: forming a group failed", self._pool)
                self._end(f"pool {self._pool!r}: forming a group failed: {type(error).__name__}: {error}")
            else:
                tries = 0
                if not self._changed.is_set():
                    self.generation = self._last
                    self._settled.set()

    def _end(self, message: str) -> None:
        self.over = message
        self._settled.set()
