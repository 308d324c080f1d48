"""The shipped pair in float32, and runs of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pool.local_pool import LocalPool
from tests.engine.harness import Reference, reference
from tests.engine.margin import assert_same_tokens
from training.data.arithmetic import MIDDLE_DIFFICULTY, heldout
from turnout.calls import ChatMessage, Chunk, GenerateCall, TokenOut, Usage
from turnout.config import ModelConfig, PoolConfig, TurnoutConfig, model_path
from turnout.types import SamplingParams

MEMORY = 64 << 20


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Reply:
    """What came back for one call."""

    prompt: str
    sampling: SamplingParams
    text: str
    tokens: tuple[TokenOut, ...]
    usage: Usage

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Maximal runs of one model: (name, length)."""
        runs: list[tuple[str, int]] = []
        for token in self.tokens:
            if runs and runs[-1][0] == token.source:
                runs[-1] = (token.source, runs[-1][1] + 1)
            else:
                runs.append((token.source, 1))
        return runs


def demo_config(small: str = "demo:small", large: str = "demo:large") -> TurnoutConfig:
    """The shipped pair, or the same model twice, in float32."""
    return TurnoutConfig(
        models={
            "small": ModelConfig(path=small, dtype="float32", kv_memory_bytes=MEMORY),
            "large": ModelConfig(path=large, dtype="float32", kv_memory_bytes=MEMORY),
        },
        pools={"demo": PoolConfig(small="small", large="large")},
    )


async def _opened(config: TurnoutConfig) -> AsyncIterator[LocalPool]:
    pool = LocalPool.load("demo", config)
    yield pool
    assert pool.stats().sequences == 0
    assert pool.stats().used_blocks == 0
    for engine in pool.engines.values():
        engine.pool.check_integrity()
    await pool.close()


@pytest.fixture
async def pool() -> AsyncIterator[LocalPool]:
    async for opened in _opened(demo_config()):
        yield opened


@pytest.fixture
async def twin_pool() -> AsyncIterator[LocalPool]:
    """The large model in both roles."""
    async for opened in _opened(demo_config(small="demo:large")):
        yield opened


def demo_reference(role: str) -> Reference:
    """A shipped model as plain Hugging Face code runs it, in float32."""
    return reference(model_path(ModelConfig(path=f"demo:{role}")))


def assert_same_ids(
    prompt: list[int], expected: Sequence[int], got: Sequence[int], role_at: Callable[[int], str], sampling: Any
) -> None:
    """Equal tokens up to a tie of the model that wrote the token there (see `tests.engine.margin`)."""

    def scores_at(place: int) -> torch.Tensor:
        return demo_reference(role_at(place)).scores(prompt, list(expected), sampling, sampling.seed)[place]

    assert_same_tokens(expected, got, scores_at)


def assert_same_answers(pool: LocalPool, expected: list[Reply], got: list[Reply], decided_by: str = "") -> None:
    """The same tokens for every prompt; `decided_by` names the model whose choice each token is, if always one."""
    assert len(expected) == len(got)
    for before, after in zip(expected, got, strict=True):
        prompt = pool.tokenizer.encode_chat((ChatMessage("user", before.prompt),))
        assert_same_ids(
            prompt, before.ids, after.ids, lambda place, b=before: decided_by or b.tokens[place].source, before.sampling
        )


Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def ask() -> Ask:
    """Answer one prompt: ask(pool, prompt, method, params, **sampling)."""

    async def go(
        pool: LocalPool, prompt: str, method: str = "plain", params: dict[str, Any] | None = None, **sampling: Any
    ) -> Reply:
        chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 96, "seed": 7, **sampling})
        messages = (ChatMessage("user", prompt),)
        call = GenerateCall("t", "demo", chosen, messages=messages, method=method, params=params or {})
        text, usage = "", None
        tokens: list[TokenOut] = []
        async for event in pool.generate(call):
            if isinstance(event, Chunk):
                text += event.text
                tokens.extend(event.tokens)
            elif isinstance(event, Usage):
                usage = event
        assert usage is not None
        return Reply(prompt, chosen, text, tuple(tokens), usage)

    return go


@pytest.fixture(scope="session")
def ask_all(ask: Ask) -> Ask:
    """Answer many prompts at once."""

    async def go(pool: LocalPool, prompts: list[str], *args: Any, **kwargs: Any) -> list[Reply]:
        return list(await asyncio.gather(*(ask(pool, prompt, *args, **kwargs) for prompt in prompts)))

    return go


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return [problem.prompt for problem in heldout(MIDDLE_DIFFICULTY, 100, seed=3)]
