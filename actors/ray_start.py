"""Starting a Ray on this machine, again where a start fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil
import ray

from turnout.errors import Code, TurnoutError

TRIES = 3

Started = TypeVar("Started")
_logger = logging.getLogger(__name__)


def start_ray(folder: str, **settings: Any) -> None:
    """Start a Ray for this process and what it starts, and connect to it.

    Args:
        folder: its temporary directory, which no other Ray of this process has.
        settings: of `ray.init`.

    Raises:
        TurnoutError: it has not started, three times.
    """

    def init() -> None:
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=folder,
                **settings,
            )
        except BaseException:
            ray.shutdown()  # a node that is up, but could not be connected to, is in the way of the next one
            raise

    try_to_start(init, folder)


def try_to_start(start: Callable[[], Started], folder: str) -> Started:
    """Call `start`, and again where it fails: Ray gives a node 30 s, which a busy machine may exceed.

    Ray leaves the processes of a failed start running. They are ended, so that nothing of it is in the next one's way.

    Args:
        start: starts Ray, with `folder` as its temporary directory.
        folder: tells the processes that `start` began from others of this process, for it stands in their commands.

    Raises:
        TurnoutError: it has failed three times.
    """
    left = TRIES
    while True:
        others = {child.pid for child in psutil.Process().children()}
        try:
            return start()
        except Exception as error:
            left -= 1
            _end([child for child in psutil.Process().children() if child.pid not in others and _names(child, folder)])
            if not left:
                message = f"Ray has not started on this machine in {TRIES} tries: {error}"
                raise TurnoutError(Code.UNAVAILABLE, message) from error
            # As text: the error holds the failed node, and a log may hold the error.
            _logger.warning("Ray has not started, %d more tries: %s", left, str(error))


def _names(process: psutil.Process, folder: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(folder in argument for argument in process.cmdline())
    return False


def _end(roots: list[psutil.Process]) -> None:
    """Kill processes and all that they have started."""
    processes = list(roots)
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            processes.extend(root.children(recursive=True))
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
