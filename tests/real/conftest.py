"""The real model that `make real` fetches, served in float32: one pool for all tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from experiments import real_model
from pool.local_pool import LocalPool
from tests.engine.harness import Reference, reference
from training.data import real_text
from turnout.calls import ChatMessage, Chunk, GenerateCall, ScoreCall, ScoredTokens
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

TOKENS = 32
KINDS = (*real_text.KINDS, real_text.SCRIPTS)


class Served:
    """The real model in a pool, on an event loop of its own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.pool = LocalPool.load(real_model.POOL, real_model.alone("float32"))

    def chat(self, text: str) -> tuple[int, ...]:
        """Token ids of a conversation that begins with this message."""
        return tuple(self.pool.tokenizer.encode_chat([ChatMessage("user", text)]))

    def ask(
        self,
        prompts: list[tuple[int, ...] | str],
        method: str = "plain",
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """Greedy answers, all asked at once: token ids, the end token included."""
        settings = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, **sampling})

        async def one(prompt: tuple[int, ...] | str) -> list[int]:
            call = GenerateCall("real", self.pool.name, settings, prompt=prompt, method=method, params=params or {})
            events = [event async for event in self.pool.generate(call)]
            return [token.id for event in events if isinstance(event, Chunk) for token in event.tokens]

        async def all_of_them() -> list[list[int]]:
            return list(await asyncio.gather(*map(one, prompts)))

        return self._runner.run(all_of_them())

    def score(self, prompt: str, completion: str) -> ScoredTokens:
        """Log-probabilities of a completion."""
        call = ScoreCall("real", self.pool.name, prompt, (completion,))
        [found] = self._runner.run(self.pool.score(call))
        return found

    def close(self) -> None:
        """End the pool; nothing may be held by then."""
        assert self.pool.stats().sequences == 0
        assert self.pool.stats().used_blocks == 0
        self._runner.run(self.pool.close())
        self._runner.close()


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The checkpoint; without it the test is skipped, with the command that fetches it."""
    try:
        return real_model.model_folder()
    except TurnoutError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def served(model_folder: Path) -> Iterator[Served]:
    opened = Served()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def plain(model_folder: Path) -> Reference:
    """The model as Hugging Face runs it, in float32."""
    return reference(model_folder)
