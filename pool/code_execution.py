"""The sandbox of a pool: programs that its models wrote run there, a few at once, behind the walls it asks for."""

from __future__ import annotations

import sys

from decoding.code_execution import Execution
from pool.concurrency import ConcurrencyLimiter
from pool.sandbox import Limits, run_python
from turnout.pool_config import SandboxConfig


class SandboxedPython:
    """Executor of Python programs in processes with limits; see `decoding.code_execution.CodeExecutor`.

    Args:
        config: the limits, and the walls without which nothing is run.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._limits = Limits(
            timeout_s=config.timeout_s,
            cpu_s=config.cpu_s,
            memory_bytes=config.memory_bytes,
            file_bytes=config.file_bytes,
            processes=0,
        )
        # None is refused: what waits is bounded by the pool's calls, each with the programs that it sampled.
        self._places = ConcurrencyLimiter("sandbox", config.max_running, sys.maxsize, strict=True, kind="part")

    @property
    def cpu_s(self) -> float:
        """See `CodeExecutor`."""
        return float(self._config.cpu_s)

    async def run(self, program: str, given: object, tenant: str) -> Execution:
        """See `CodeExecutor.run`; tenants take turns."""
        async with self._places.hold(tenant):
            ended = await run_python(program, self._limits, given, self._config.walls)
        return Execution(ended.outcome == "passed", ended.reason, ended.result)
