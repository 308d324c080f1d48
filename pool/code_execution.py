"""The sandbox of a pool: programs that its models wrote run there, a few at once, behind the walls it asks for."""

from __future__ import annotations

import asyncio

from decoding.code_execution import Execution
from pool.sandbox import Limits, run_python
from turnout.errors import Code, TurnoutError
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
        self._places = asyncio.Semaphore(config.max_running)
        self._walled = False

    @property
    def cpu_s(self) -> float:
        """See `CodeExecutor`."""
        return float(self._config.cpu_s)

    async def run(self, program: str, given: object) -> Execution:
        """See `CodeExecutor.run`."""
        async with self._places:
            if not self._walled:
                await self._check_walls()
            ended = await run_python(program, self._limits, given)
        return Execution(ended.outcome == "passed", ended.reason, ended.result)

    async def _check_walls(self) -> None:
        """Run nothing, to see which walls stand.

        Raises:
            TurnoutError: UNAVAILABLE: one that is asked for does not.
        """
        walls = (await run_python("", self._limits)).walls
        if missing := [wall for wall in self._config.walls if wall not in walls]:
            said = f"this machine's kernel has no wall against {', '.join(missing)}, which sandbox.walls asks for"
            raise TurnoutError(Code.UNAVAILABLE, said)
        self._walled = True
