"""Sides that answer a few prompts at once, timed: our engine with any method, or Hugging Face `generate`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from experiments.grid.contenders import Contender
from experiments.hf_model import load
from experiments.speculation.tasks import Prompt
from pool.local_pool import LocalPool
from turnout.calls import Chunk, GenerateCall, TokenOut, Usage
from turnout.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer.

    Attributes:
        tokens: of the answer; from other engines than ours only their ids are known.
        usage: what it cost, where our engine answered.
    """

    tokens: tuple[int, ...]
    given: tuple[TokenOut, ...] = ()
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Prompts answered at once: `seconds` from handing them over to having all answers."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)


class Side(Protocol):
    """One of the two that take turns in a cell."""

    async def answer(self, prompts: dict[int, Prompt]) -> Turn:
        """Answer all prompts at once, each under its number, which seeds what is drawn."""
        ...

    def forget(self) -> None:
        """Drop what was learned and cached."""
        ...


@dataclass(frozen=True, slots=True)
class OurSide:
    """A contender on our engine. What it learns outlives an answer, as it does for a tenant of a server.

    Attributes:
        tenant: keeps what this side learns and caches from the other.
    """

    pool: LocalPool
    contender: Contender
    temperature: float
    max_tokens: int
    tenant: str

    def call(self, number: int, prompt: Prompt) -> GenerateCall:
        """The request for a prompt."""
        sampling = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=number)
        params = self.contender.params or {}
        name = f"{self.tenant}-{number}"
        method = self.contender.method
        return GenerateCall(name, self.pool.name, sampling, prompt, method=method, params=params, tenant=self.tenant)

    async def answer(self, prompts: dict[int, Prompt]) -> Turn:
        """See `Side.answer`."""
        calls = [self.call(number, prompt) for number, prompt in prompts.items()]
        started = time.perf_counter()
        answers = await asyncio.gather(*map(self._one, calls))
        return Turn(time.perf_counter() - started, tuple(answers))

    async def _one(self, call: GenerateCall) -> Answer:
        tokens: list[TokenOut] = []
        usage = None
        async for event in self.pool.generate(call):
            if isinstance(event, Chunk):
                tokens += event.tokens
            elif isinstance(event, Usage):
                usage = event
        return Answer(tuple(token.id for token in tokens), tuple(tokens), usage)

    def forget(self) -> None:
        """See `Side.forget`."""
        for engine in self.pool.engines.values():
            engine.stores.forget(self.tenant)
            engine.pool.clear_cached()


@dataclass(slots=True)
class Checkpoints:
    """Models as transformers loads them, each once and when it is first asked for."""

    dtype: str
    device: str
    _loaded: dict[Path, Any] = field(default_factory=dict)

    def open(self, folder: Path) -> Any:
        """The model in a folder."""
        if folder not in self._loaded:
            self._loaded[folder] = load(str(folder), self.dtype).to(self.device)
        return self._loaded[folder]


@dataclass(frozen=True, slots=True)
class HuggingFaceSide:
    """`generate` of transformers, greedily, one prompt at a time.

    Attributes:
        threads: of its arithmetic, as many as our engine has.
        options: what makes it speculative: `assistant_model` or `prompt_lookup_num_tokens`.
        device: of the model.
    """

    model: Any
    max_tokens: int
    threads: int
    options: dict[str, Any]
    device: str = "cpu"

    async def answer(self, prompts: dict[int, Prompt]) -> Turn:
        """See `Side.answer`."""
        started = time.perf_counter()
        answers = [Answer(await asyncio.to_thread(self._generate, prompt)) for prompt in prompts.values()]
        return Turn(time.perf_counter() - started, tuple(answers))

    @torch.inference_mode()
    def _generate(self, prompt: Prompt) -> tuple[int, ...]:
        torch.set_num_threads(self.threads)  # a count of this thread, which another may have been given
        ids = torch.tensor([prompt], device=self.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_tokens,
            do_sample=False,
            pad_token_id=self.model.config.pad_token_id or 0,
            **self.options,
        )
        return tuple(output[0, len(prompt) :].tolist())

    def forget(self) -> None:
        """See `Side.forget`: it keeps nothing."""
