"""Barrier between the phases of a start: no phase begins before all ranks ended the previous one, and no rank hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from engine.parallel.connections import Frame, Link, LinkClosedError
from engine.parallel.framing import Op, pack_text, unpack_text
from engine.parallel.group import Group
from turnout.errors import Code, TurnoutError

T = TypeVar("T")
LOOK_S = 0.05  # between two looks at the others while this rank works


def agree(group: Group, done: str, mark: str, deadline: float) -> None:
    """Wait until every rank has done something, with the same result.

    Args:
        group: the ranks.
        done: what, for messages: "load the model".
        mark: the result.
        deadline: of `time.monotonic`.

    Raises:
        TurnoutError: UNAVAILABLE: a rank did not do it in time, or with another result; it is named.
        LinkClosedError: on a follower: the leader has ended the group.
    """
    if not group.leads:
        group.tell(Op.READY, pack_text(mark))
        if _answer(group.links[0], done, deadline).op is not Op.GO:
            raise LinkClosedError("the leader has ended the group")
        return
    for link in group.links:
        theirs = unpack_text(_answer(link, done, deadline).arrays[0])
        if theirs != mark:
            message = f"{link} did not {done} with the same content as rank 0: put the same files on every node"
            raise TurnoutError(Code.UNAVAILABLE, message)
    group.tell(Op.GO)


def _answer(link: Link, done: str, deadline: float) -> Frame:
    """What a rank says at the end of a phase."""
    while True:
        try:
            frame = link.receive(deadline - time.monotonic())
        except TimeoutError:
            raise TurnoutError(Code.UNAVAILABLE, f"{link} did not {done} in time") from None
        except LinkClosedError:
            raise TurnoutError(Code.UNAVAILABLE, f"{link} ended before all ranks could {done}") from None
        if frame.op is Op.FAILED:
            raise TurnoutError(Code.UNAVAILABLE, f"{link} could not {done}: {unpack_text(frame.arrays[0])}")
        if frame.op is not Op.BEAT:
            return frame


def watched(group: Group, done: str, work: Callable[[], T], deadline: float) -> T:
    """Do this rank's part of something, and give up as soon as another rank has: what waits for that one may never end.

    Args:
        group: the ranks.
        done: what, for messages.
        work: in a thread of its own, which is left behind where it is given up.
        deadline: of `time.monotonic`.

    Raises:
        TurnoutError: UNAVAILABLE: a rank has ended, or this one was not done in time; what `work` raises.
    """
    result: Future[T] = Future()
    threading.Thread(target=_run, args=(work, result), name=f"rank-{group.rank}", daemon=True).start()
    while not wait([result], LOOK_S).done:
        for link in group.links:
            _look(link, done)
        if time.monotonic() > deadline:
            raise TurnoutError(Code.UNAVAILABLE, f"rank {group.rank} of {group.world} did not {done} in time")
    return result.result()


def _run(work: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def _look(link: Link, done: str) -> None:
    """Raises TurnoutError where a rank has ended."""
    try:
        frames = link.drain()
    except LinkClosedError:
        raise TurnoutError(Code.UNAVAILABLE, f"{link} ended before all ranks could {done}") from None
    for frame in frames:
        if frame.op is Op.FAILED:
            raise TurnoutError(Code.UNAVAILABLE, f"{link} could not {done}: {unpack_text(frame.arrays[0])}")
        if frame.op is Op.END:
            raise TurnoutError(Code.UNAVAILABLE, f"{link} has ended the group")
        if frame.op is not Op.BEAT:
            link.keep(frame)  # it is further already
