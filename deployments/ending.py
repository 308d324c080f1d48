"""Ending an application, also where the Ray it runs on is ended first."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.serve_internals import served_applications

POLL_S = 0.1
ANSWER_S = 2.0  # the controller may take to say what is served
# Beyond the grace: for processes to end.
ENDING_S = 15.0


def end_app(name: str, grace_s: float) -> None:
    """Delete an application: what runs has so long to end. What is left then, its cluster ends in its own time.

    Returns early where Serve never came up, or where a Ray that this process has started ends: who signals a process
    group, as systemd does for a unit, ends Ray's processes with this one. Serve would be waited for in vain, until Ray
    ends this process after a minute.
    """
    with suppress(RayServeException):
        serve.delete(name, _blocking=False)
        until = time.monotonic() + grace_s + ENDING_S
        while time.monotonic() < until:
            try:
                if name not in served_applications(ANSWER_S):
                    return
            except RayError:
                if any(map(_ended, psutil.Process().children())):
                    return
            time.sleep(POLL_S)


def _ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
