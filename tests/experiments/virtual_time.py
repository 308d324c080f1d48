"""An event loop whose clock jumps to the next timer: what would take seconds takes none, and times are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and no timer runs"
        self.loop.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Seconds are `now`; code under test may move it on to pretend that it blocked the loop."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
