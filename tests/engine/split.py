"""Models split over this process, which leads, and others: the processes, and engine models over them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.backends.base import Kernels
from engine.device import Device
from engine.model import EngineModel
from engine.parallel import join, load_sharded
from pool.concurrency import ConcurrencyLimiter
from pool.local_pool import LocalPool
from pool.text import TextTokenizer
from tests.engine.harness import pair_config, shrink
from tests.engine.rank_process import serve
from turnout.config import EngineConfig, ModelConfig
from turnout.free_ports import free_port

HOST = "127.0.0.1"
STEP_S = 20.0


class RankProcess:
    """A process for a rank other than 0; see `rank_process`. Forked from one that has imported everything."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.engine.rank_process"])
        self._jobs, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, **job: Any) -> None:
        """Give it a job: arguments of `join`, and `folder`, `kernels`, `dtype`, `ignored`."""
        self._jobs.send(job)

    def outcome(self) -> dict[str, Any]:
        """How the job ended; waits for it."""
        assert self._jobs.poll(60), "the rank does not end"
        outcome: dict[str, Any] = self._jobs.recv()
        return outcome

    def kill(self) -> None:
        """Returns when it is gone."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._jobs.close()
        self.kill()


@contextmanager
def split(
    processes: RankProcess | list[RankProcess],
    folder: Path,
    name: str = "m",
    kernels: Kernels = "auto",
    dtype: torch.dtype = torch.float32,
    num_blocks: int | None = None,
    step_timeout_s: float = STEP_S,
    ignored: tuple[str, ...] = (),
    **engine: Any,
) -> Iterator[EngineModel]:
    """A checkpoint split over this process and others.

    Args:
        processes: rank 1, or ranks 1, 2 and so on.
        folder: of the checkpoint.
        name: what requests call it.
        kernels: see `engine.backends.base.choose_backend`.
        dtype: of its weights.
        num_blocks: exact size of the block pool.
        step_timeout_s: see `join`.
        ignored: operations that rank 1 forgets.
        engine: of `EngineConfig`.
    """
    settings = EngineConfig(**engine)
    others = processes if isinstance(processes, list) else [processes]
    address = {"world": 1 + len(others), "address": HOST, "port": free_port(), "timeout_s": 60.0}
    address["step_timeout_s"] = step_timeout_s
    for rank, process in enumerate(others, start=1):
        options = {"kernels": kernels, "dtype": dtype, "ignored": list(ignored)}
        process.start(rank=rank, folder=str(folder), **options, **address)
    group = join(0, **address)
    try:
        checkpoint = load_sharded(group, name, folder, dtype, kernels, settings.shared_attention, 60.0)
        config = ModelConfig(path="-", kv_memory_bytes=8 << 20)
        model = EngineModel(name, checkpoint, config, settings, Device("cpu"))
        if num_blocks is not None:
            shrink(model, num_blocks)
        yield model
    finally:
        group.close()


def pool_with(large: EngineModel, folder: Path, num_blocks: int | None = None, **engine: Any) -> LocalPool:
    """The pair with this model in the place of `large`."""
    whole = LocalPool.load("pair", pair_config(folder, **engine))
    models = {"small": whole.engines["small"], "large": large}
    if num_blocks is not None:
        for model in models.values():
            shrink(model, num_blocks)
    roles = {"small": "small", "large": "large"}
    return LocalPool("pair", models, roles, TextTokenizer(folder / "large"), ConcurrencyLimiter("pair", 64, 64))


def whole_pool(folder: Path, num_blocks: int | None = None, **engine: Any) -> LocalPool:
    """The pair, each model in this process alone."""
    pool = LocalPool.load("pair", pair_config(folder, **engine))
    if num_blocks is not None:
        for model in pool.engines.values():
            shrink(model, num_blocks)
    return pool


async def idle(pool: LocalPool) -> None:
    """Nothing may be left in it."""
    assert (pool.stats().sequences, pool.stats().used_blocks, pool.stats().waiting) == (0, 0, 0)
    for model in pool.engines.values():
        model.pool.check_integrity()
    await pool.close()
