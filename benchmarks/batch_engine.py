"""The engine alone on the prompts of a job: what the job's speed is measured by."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.batch_chaos import write_prompts
from turnout.calls import ChatMessage, GenerateCall
from turnout.config import TurnoutConfig, load_config
from turnout.gc_freeze import freeze_loaded
from turnout.throughput_config import throughput_settings
from turnout.types import SamplingParams

if TYPE_CHECKING:
    from pool.local_pool import LocalPool

WARM_UP = 64  # lines, not counted


async def rate(
    rows: int, max_tokens: int, concurrency: int, config: str = "", alike: bool = False, processes: int = 1
) -> float:
    """Lines a second of a pool in this process.

    Args:
        rows: lines.
        max_tokens: of an answer.
        concurrency: lines at once.
        config: file whose first pool it is; "": the demo pair.
        alike: with the settings that a job has where the configuration says nothing of them.
        processes: number that share the machine.
    """
    from pool import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        write_prompts(path, rows + WARM_UP)
        prompts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8-sig").splitlines()]
    settings = load_config(Path(config)) if config else TurnoutConfig.demo()
    if alike:
        settings = settings.model_copy(update={"engine": throughput_settings(settings.engine, processes)})
    pool = load(settings)
    freeze_loaded()  # as processes that serve do
    try:
        await _answer(pool, prompts[:WARM_UP], max_tokens, concurrency)
        started = time.perf_counter()
        await _answer(pool, prompts[WARM_UP:], max_tokens, concurrency)
        return rows / (time.perf_counter() - started)
    finally:
        await pool.close()


async def _answer(pool: LocalPool, prompts: list[str], max_tokens: int, concurrency: int) -> None:
    room = asyncio.Semaphore(concurrency)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)

    async def one(place: int, prompt: str) -> None:
        async with room:
            call = GenerateCall(f"line-{place}", pool.name, sampling, messages=(ChatMessage("user", prompt),))
            async with aclosing(pool.generate(call)) as events:  # type: ignore[type-var]
                async for _ in events:
                    pass

    await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(prompts)))
