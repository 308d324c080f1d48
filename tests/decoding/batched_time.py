"""Models whose forwards batch what waits for them and take a virtual time by their rows, as an engine's do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from decoding.drafter_state import Stores
from decoding.fakes import NextLogits, TableModel, pair
from decoding.model import Request, TokenText
from decoding.operations import Extend, PrefillAhead, Verify
from decoding.sequence import Sequence
from tests.decoding.virtual_time import VirtualLoop
from turnout.registry import get_method
from turnout.types import SamplingParams

Cost = Callable[[int], float]  # seconds of a forward, by its rows

# What a further row costs of a forward of one: a GPU's next to nothing, an AVX-512 machine's, and an AVX2 machine's.
COSTS: dict[str, Cost] = {
    "flat": lambda rows: 1.0 + 0.01 * (rows - 1),
    "avx512": lambda rows: 1.0 + 0.1 * (rows - 1),
    "avx2": lambda rows: 1.0 + 0.25 * (rows - 1),
    "steps of four": lambda rows: 1.0 + 0.5 * ((rows - 1) // 4),
}


class BatchedModel(TableModel):
    """Forwards of all that waits when the one before has ended.

    Attributes:
        cost: what forwards are predicted to take.
        factor: of it that they take, drawn anew for each between these bounds.
    """

    cost: Cost
    factor: tuple[float, float] = (1.0, 1.0)

    def __init__(
        self, name: str, next_logits: NextLogits, vocab_size: int, cost: Cost, num_parameters: int = 1, seed: int = 0
    ) -> None:
        super().__init__(name, next_logits, vocab_size, num_parameters)
        self.cost = cost
        self._draw = random.Random(seed)
        self._fed: dict[Sequence, tuple[int, int]] = {}
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._runs: asyncio.Task[None] | None = None
        self._reading_s = 0.0

    def forward_seconds(self, fed: int, attended: int, sequences: int) -> float:
        return self.cost(fed)

    def step_seconds(self) -> float:
        return self.cost(1)

    def reading_seconds(self) -> float:
        return self._reading_s

    def _feed(self, seq: Sequence, tokens: list[int], recompute: int, num_tree_tokens: int = 0) -> None:
        before, read = self.fed_tokens, seq.meter.of(self.name, self.num_parameters).prompt_tokens
        super()._feed(seq, tokens, recompute, num_tree_tokens)
        prompt = seq.meter.of(self.name, self.num_parameters).prompt_tokens - read
        self._fed[seq] = (self.fed_tokens - before, prompt)

    async def do(self, seq: Sequence, op: Any) -> Any:
        self._fed.pop(seq, None)
        done = await super().do(seq, op)
        fed, prompt = self._fed.pop(seq, (0, 0))
        if fed and isinstance(op, Extend | Verify | PrefillAhead):
            ended = asyncio.get_running_loop().create_future()
            self._waiting.append((fed, prompt, ended))
            if self._runs is None or self._runs.done():
                self._runs = asyncio.create_task(self._run())
            await ended
        return done

    async def _run(self) -> None:
        while self._waiting:
            for _ in range(30):  # all that can join do
                await asyncio.sleep(0)
            batch, self._waiting = self._waiting, []
            rows = sum(fed for fed, _, _ in batch)
            seconds = self.cost(rows) * self._draw.uniform(*self.factor)
            await asyncio.sleep(seconds)
            self._reading_s += seconds - min(self.cost(rows - sum(max(p - 1, 0) for _, p, _ in batch)), seconds)
            for _, _, ended in batch:
                ended.set_result(None)


def timed(
    method: str,
    params: dict[str, Any],
    small: BatchedModel,
    large: BatchedModel,
    prompts: Items[Items[int]],
    tokenizer: TokenText | None = None,
    **sampling: Any,
) -> tuple[list[Request], float]:
    """Answer the prompts at once; return the requests, and the virtual seconds they took.

    What was learned stays in `large.stores`.
    """
    info = get_method(method)
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 128, **sampling})
    requests = [Request(f"r{i}", Sequence(prompt, asked, seed=i)) for i, prompt in enumerate(prompts)]

    async def one(request: Request) -> None:
        clock = asyncio.get_running_loop().time
        models = replace(pair(small, large, tokenizer), clock=clock)
        async for _ in info.run(request, models, info.parse(params)):
            pass
        for model in (small, large):
            model.release(request.sequence)

    async def all_of_them() -> float:
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*map(one, requests))
        return asyncio.get_running_loop().time() - started

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return requests, runner.run(all_of_them())


def forget(*models: BatchedModel) -> None:
    """Let models begin with nothing learned."""
    for model in models:
        model.stores = Stores()
