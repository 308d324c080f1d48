"""A server as a load client sees it: one request at a time, in order, and one of them stalls everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from experiments.load.clients import Refused


class OneAtATime:
    """Takes `service_s` for a request, `stall_s` more for number `stalled`, and refuses what is over `room`."""

    def __init__(self, service_s: float, stalled: int = -1, stall_s: float = 0.0, room: int = 10**6) -> None:
        self.service_s = service_s
        self.stalled = stalled
        self.stall_s = stall_s
        self.room = room
        self._asked = 0
        self._waiting = 0
        self._free_at = 0.0

    async def answer(self, prompt: str, output: Callable[[], None]) -> int:
        if self._waiting >= self.room:
            raise Refused("RESOURCE_EXHAUSTED")
        loop = asyncio.get_running_loop()
        stall = self.stall_s if self._asked == self.stalled else 0.0
        self._asked += 1
        self._waiting += 1
        self._free_at = max(self._free_at, loop.time()) + self.service_s + stall
        await asyncio.sleep(self._free_at - loop.time())
        self._waiting -= 1
        output()
        return 1

    async def close(self) -> None:
        pass


class Silent:
    """Never answers."""

    async def answer(self, prompt: str, output: Callable[[], None]) -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    async def close(self) -> None:
        pass
