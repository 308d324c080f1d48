"""Messages to an actor as bytes, and what is said where they, or its replies, cannot be sent."""

from __future__ import annotations

import os
import pickle
import platform
from typing import Any

from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

from turnout.errors import Code, TurnoutError

FULL = (ObjectStoreFullError, OutOfDiskError)
Message = tuple[Any, ...]


def pickled(messages: list[Message], to: str) -> tuple[bytes, list[tuple[Message, TurnoutError]]]:
    """Messages as one post, without those that cannot be pickled.

    Args:
        messages: in their order.
        to: name of the actor, for errors.

    Returns:
        The post, and what is not in it: INTERNAL, with what prevents it.
    """
    try:
        return pickle.dumps(messages, protocol=5), []
    except Exception:  # which of them is to be found out
        sound: list[Message] = []
    faulty: list[tuple[Message, TurnoutError]] = []
    for message in messages:
        try:
            pickle.dumps(message, protocol=5)
        except Exception as error:
            what = f"a message to {to} cannot be pickled: {type(error).__name__}: {error}"
            faulty.append((message, TurnoutError(Code.INTERNAL, what)))
        else:
            sound.append(message)
    return pickle.dumps(sound, protocol=5), faulty


def not_sent(size: int, to: str, error: Exception) -> TurnoutError:
    """Return the error of the calls in a post that this process could not hand to Ray.

    Args:
        size: of the post, bytes.
        to: name of the actor.
        error: what Ray said.
    """
    return TurnoutError(
        Code.RESOURCE_EXHAUSTED,
        f"{size} bytes for {to} could not be sent from {platform.node()} pid {os.getpid()}"
        f" ({type(error).__name__}: {error}); look whether Ray's object store on this node is full",
    )


def store_full(error: BaseException, ip: str) -> TurnoutError | None:
    """Why replies ended, where Ray's object store had no room for one of them: whatever was at work is not to blame.

    Args:
        error: that ended them.
        ip: of the actor's node.

    Returns:
        RESOURCE_EXHAUSTED, naming the node and what to do; None: it was something else.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if not isinstance(cause, FULL):
        return None
    node = platform.node() if cause is error else ip
    return TurnoutError(
        Code.RESOURCE_EXHAUSTED,
        f"Ray's object store on node {node} is full, and so is the disk that it spills to ({type(cause).__name__}): a"
        " reply found no room; see `ray memory`, free the disk, or start Ray there with a larger store"
        " (--object-store-memory)",
    )
