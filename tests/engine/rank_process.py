"""What a process does that is one rank of split models, one after the other: jobs come in and outcomes go out."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.parallel import follow, join
from engine.parallel.framing import Op
from engine.parallel.worker import Follower
from turnout.errors import TurnoutError


def serve(jobs: Connection) -> None:
    """Work until there are no more jobs."""
    torch.set_num_threads(1)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        outcome: dict[str, Any] = {"error": None}
        try:
            work(job)
        except TurnoutError as error:
            outcome = {"error": type(error).__name__, "message": error.message}
        jobs.send(outcome)


def work(job: dict[str, Any]) -> None:
    """Join, follow, and return when that ends. `ignored`: operations that a faulty rank forgets."""
    ignored = {Op[name] for name in job.pop("ignored", [])}
    folder, kernels, dtype = job.pop("folder"), job.pop("kernels", "auto"), job.pop("dtype", torch.float32)
    group = join(**job)
    repeat = Follower._repeat

    def forgetful(self: Follower, op: Op, arrays: list[Any]) -> None:
        if op not in ignored:
            repeat(self, op, arrays)

    Follower._repeat = forgetful  # type: ignore[method-assign]
    try:
        follow(group, "m", Path(folder), dtype, kernels, timeout_s=60.0)
    finally:
        Follower._repeat = repeat  # type: ignore[method-assign]
