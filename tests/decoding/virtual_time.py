"""Models whose forwards take time, by a clock that jumps: what runs at the same time, and how long it all takes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from decoding.fakes import TableModel, pair
from decoding.model import ReadSpec, Request
from decoding.sequence import Sequence
from turnout.registry import get_method
from turnout.types import SamplingParams


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class SlowModel(TableModel):
    """Every forward takes so many seconds of the loop's clock; keeps a list of when they began and ended."""

    seconds = 1.0
    trace: list[tuple[float, float]]

    async def _take(self) -> None:
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(self.seconds)
        self.trace.append((started, asyncio.get_running_loop().time()))

    async def extend(self, seq: Any, tokens: Any = (), want: ReadSpec = ReadSpec(), every: bool = False) -> Any:
        await self._take()
        return await super().extend(seq, tokens, want, every)

    async def verify(self, seq: Any, draft: Any, verifier: Any, want: ReadSpec = ReadSpec(draw=None)) -> Any:
        await self._take()
        return await super().verify(seq, draft, verifier, want)


def slow(model: TableModel, seconds: float) -> SlowModel:
    made = SlowModel(model.name, model.next_logits, model.vocab_size, model.num_parameters)
    made.seconds, made.trace = seconds, []
    return made


def play(method: str, params: Any, small: TableModel, large: TableModel, max_tokens: int) -> tuple[Sequence, float]:
    """The answer, and how long it took by the virtual clock."""
    info = get_method(method)
    seq = Sequence((1, 2), SamplingParams(max_tokens=max_tokens), 4)

    async def go() -> float:
        clock = asyncio.get_running_loop().time
        models = replace(pair(small, large), clock=clock)
        async for _ in info.run(Request("r", seq), models, info.parse(params)):
            pass
        return clock()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return seq, runner.run(go())
