"""A device: one worker thread, one forward at a time, shared by the models that live on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Device:
    """Serialises forwards of all models on one torch device; whoever asked first goes first.

    Args:
        name: torch device name.
    """

    def __init__(self, name: str) -> None:
        self.torch_device = torch.device(name)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"forward-{name}")
        self.turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the device's thread. The caller holds `turn`."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """End the thread after the forward in progress."""
        self._executor.shutdown(wait=True)
