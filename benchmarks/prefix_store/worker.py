"""An engine in a process of its own that is controlled by lines of JSON: its arguments are a checkpoint and a root key.

{"url": ..., "admission": ...} opens a store (null: none), {"prompts": [[ids], ...]} answers prompts at the same time.
Each line is answered by one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.prefix_store.workbench import Workbench, settled
from engine.cache.connector import SharedPrefixes

THREADS = 1


async def answer(bench: Workbench, bridge: SharedPrefixes | None, prompts: list[list[int]]) -> dict[str, Any]:
    """One token after each prompt, all asked for at once; what was computed for them."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(bench.first_token(bridge, prompt, fresh=False) for prompt in prompts))
    seconds = time.perf_counter() - began
    if bridge is not None:
        await settled(bridge)
    return {
        "computed": sum(each.computed for each in answers),
        "fetched": sum(each.fetched for each in answers),
        "seconds": seconds,
    }


async def serve(checkpoint: Path, key: Path) -> None:
    """Do what the lines say until there are no more."""
    bench = Workbench(checkpoint, key, THREADS)
    bridge: SharedPrefixes | None = None
    async with AsyncExitStack() as outer:
        outer.push_async_callback(bench.close)
        stack = await outer.enter_async_context(AsyncExitStack())
        _say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            if "prompts" in order:
                _say(await answer(bench, bridge, order["prompts"]))
                continue
            await stack.aclose()
            bench.engine.pool.clear_cached()
            bridge = None
            if order["admission"] is not None:
                store = bench.store(order["url"], admission=order["admission"], host_memory_bytes=256 << 20)
                bridge = await stack.enter_async_context(store)
            _say({"ready": True})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
