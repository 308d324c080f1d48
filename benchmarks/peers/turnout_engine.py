"""Our engine, in process, as one of the engines under measurement."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, ClassVar

from benchmarks.peers.base import Generation, Setup

if TYPE_CHECKING:
    from pool.local_pool import LocalPool
    from turnout.calls import GenerateCall

POOL = "peers"
KV_MEMORY_BYTES = 512 << 20


class Engine:
    """`pool.load` with the defaults a server has; speculative decoding when there is a draft model.

    Attributes:
        ENGINE: the section `engine` of the configuration, in addition to the threads.
    """

    ENGINE: ClassVar[dict[str, int]] = {}

    def missing(self) -> str | None:
        """Never anything: the benchmark is part of the project."""
        return None

    def versions(self) -> dict[str, str]:
        """Ours and torch's."""
        from importlib.metadata import version

        return {"turnout": version("turnout"), "torch": version("torch")}

    def setup(self, setup: Setup) -> None:
        """Load one model, or a pair."""
        import uvloop

        import pool
        from turnout.config import parse_config

        folders = {"large": setup.model_dir, "small": setup.draft_dir or setup.model_dir}
        small = "small" if setup.draft_dir else "large"
        members = dict.fromkeys(("large", small))
        settings = {"dtype": setup.dtype, "weights": setup.weights, "kv_memory_bytes": KV_MEMORY_BYTES}
        config = parse_config(
            {
                "models": {name: {"path": folders[name], **settings} for name in members},
                "pools": {POOL: {"small": small, "large": "large"}},
                "engine": {"threads": setup.threads, **self.ENGINE},
            }
        )
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._pool: LocalPool = pool.load(config)
        self._method = "speculative" if setup.draft_dir else "plain"

    def generate(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool = False) -> Generation:
        """All prompts as concurrent requests."""
        if self._method == "plain" and not stop_at_end:
            work = self._decode(prompts, max_tokens)
        else:
            work = self._answer(prompts, max_tokens, stop_at_end)
        before = self._forward_seconds()
        started = time.perf_counter()
        answers = self._runner.run(work)
        seconds = time.perf_counter() - started
        return Generation(seconds, answers, self._forward_seconds() - before)

    def close(self) -> None:
        """Close the pool and the event loop."""
        self._runner.run(self._pool.close())
        self._runner.close()

    def _forward_seconds(self) -> float:
        return sum(model.batcher.forward_seconds for model in self._pool.engines.values())

    async def _decode(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Token ids in, token ids out: what the peers are asked for as well."""
        from decoding.sequence import Sequence
        from turnout.types import SamplingParams

        model = self._pool.engines["large"]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        sequences = [Sequence(prompt, sampling, 0) for prompt in prompts]
        await asyncio.gather(*(model.decode(seq) for seq in sequences))
        answers = [[token.id for token in seq.generated] for seq in sequences]
        for seq in sequences:
            model.release(seq)
        return answers

    async def _answer(self, prompts: list[list[int]], max_tokens: int, stop_at_end: bool) -> list[list[int]]:
        """Through the pool, text included: methods run there, and it knows the end tokens."""
        from turnout.calls import GenerateCall
        from turnout.types import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=not stop_at_end)
        drafted = {"drafter": "model_chain", "length": "fixed"}  # as peers draft
        params = {"model": "large"} if self._method == "plain" else drafted
        calls = [
            GenerateCall(f"peer-{i}", POOL, sampling, prompt=tuple(prompt), method=self._method, params=params)
            for i, prompt in enumerate(prompts)
        ]
        return list(await asyncio.gather(*(self._one(call) for call in calls)))

    async def _one(self, call: GenerateCall) -> list[int]:
        from turnout.calls import Chunk

        events = [event async for event in self._pool.generate(call)]
        return [token.id for event in events if isinstance(event, Chunk) for token in event.tokens]
