"""A scripted pool with the engine's interface: one token per letter of the alphabet, at a chosen pace."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import string
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

from decoding.tasks.base import open_task
from deployments.backend import Pool, PoolMember
from deployments.pool_deployment import load_engine
from pool.concurrency import ConcurrencyLimiter
from turnout.calls import (
    Begun,
    Chunk,
    EndToken,
    Event,
    GenerateCall,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
    TokenOut,
    Usage,
)
from turnout.config import TurnoutConfig
from turnout.cost import Cost, CostReport, ModelMeter, SpeculationMeter
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import Code, TurnoutError, invalid, not_found, out_of_range
from turnout.types import FinishReason, TokenKind

CONTEXT = 4096
UNLIMITED = 256  # tokens of an answer whose call sets no limit
VOCAB = 256
METHODS = ["entropy_adaptive", "plain"]
TOOL_CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


class FakePool:
    """Prompt words steer it: `tool` has it call one,
    `slow` waits between tokens, `crash` raises, `die` and `die_once=FILE` end the process.
    """

    def __init__(self, name: str, config: TurnoutConfig, step_s: float = 0.002) -> None:
        self.members: dict[str, PoolMember] = {}
        self.notes: list[str] = []
        self.name = name
        pool = config.pools[name]
        self.names = (pool.small, pool.large)
        self.roles, self.listed = pool.roles, pool.members
        self.places = ConcurrencyLimiter(name, pool.max_ongoing_requests, pool.max_queued_requests)
        self.step_s = step_s

    def send_away(self, count: int) -> int:
        return 0

    def forget(self, tenant: str) -> None:
        pass

    def check(self) -> None:
        pass

    async def tokens(self, call: GenerateCall) -> list[int]:
        return list(self._read(call)[1])

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def models(self) -> list[ModelDescription]:
        ends: dict[str, Any] = {"ends": (EndToken(2, "</s>"),), "ends_source": "config.json"}
        pool = ModelDescription(self.name, "fake", 3000, VOCAB, CONTEXT, self.roles, "entropy_adaptive", **ends)
        return [pool, *(ModelDescription(m, "fake", 1000, VOCAB, CONTEXT, {}, "plain") for m in self.listed)]

    def stats(self) -> PoolStats:
        active = self.places.num_held + self.places.num_waiting
        return PoolStats(active, active, active * 4, 0, 100, 0, 0.0, {})

    async def close(self) -> None:
        pass

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        if not call.prompt and not call.prompts:
            raise invalid("prompt", "must not be empty")
        scored = []
        for place, completion in enumerate(call.completions):
            prompt = call.prompts[place] if call.prompts else call.prompt
            ids = list(completion.encode()) if isinstance(completion, str) else completion
            tokens = tuple(self._token(i, 0, logprobs=1) for i in ids)
            scored.append(ScoredTokens(tokens, tuple(True for _ in tokens), len(prompt)))
        return scored

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Unit vectors of two numbers: their angle is the length."""
        lengths = [len(each) for each in call.input]
        vectors = [struct.pack("<2f", math.cos(length), math.sin(length)) for length in lengths]
        return Embeddings(b"".join(vectors), 2, tuple(lengths))

    async def task(self, call: TaskCall) -> TaskAnswer:
        """Its parameters, where it is a task and they are its own; one token is read for each of their characters."""
        open_task(call.name, dict(call.params))
        given = json.dumps(dict(call.params))
        if "wait" in given:
            await asyncio.sleep(3600)
        if "fail" in given:
            error = TurnoutError(Code.OUT_OF_RANGE, "params.text: too long", "params.text")
            error.prompt_tokens = len(given)
            raise error
        return TaskAnswer({"params": json.loads(given)}, len(given))

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        started = perf_counter()
        text, ids = self._check(call)
        async with self.places.hold(call.tenant, call.deadline_s):
            step_s = 0.2 if "slow" in text else 0.0 if "fast" in text else self.step_s
            if "wait" in text:
                await asyncio.sleep(3600)
            letters = TOOL_CALL if "tool" in text else string.ascii_lowercase if "short" not in text else "ab"
            limit = _most_tokens(call)
            for place, letter in enumerate(itertools.islice(itertools.cycle(letters), limit)):
                if place == 3 and "crash" in text:
                    raise ZeroDivisionError("secret /etc/path")
                if place == 3 and _dies(text):
                    os._exit(1)
                await asyncio.sleep(step_s)
                if place == 0 and call.include_prompt_len:
                    yield Begun(len(ids))
                last = place == limit - 1
                for index in range(call.sampling.n):
                    if call.delivered and place < len(call.delivered[index].tokens):
                        continue
                    token = self._token(ord(letter), place, call.sampling.logprobs)
                    yield Chunk(index, letter, (token,), FinishReason.LENGTH if last else None)
            yield self._usage(call, len(ids), limit * call.sampling.n, perf_counter() - started)

    def _read(self, call: GenerateCall) -> tuple[str, tuple[int, ...]]:
        if call.messages is not None:
            text = " ".join(message.content for message in call.messages)
            ids = tuple(text.encode())
        elif isinstance(call.prompt, str):
            text, ids = call.prompt, tuple(call.prompt.encode())
        else:
            text, ids = "", call.prompt or ()
            if any(not 0 <= i < VOCAB for i in ids):
                raise out_of_range("prompt", f"token ids must be from 0 to {VOCAB - 1}")
        return text, ids

    def _check(self, call: GenerateCall) -> tuple[str, tuple[int, ...]]:
        text, ids = self._read(call)
        if call.method is not None and call.method not in METHODS:
            raise not_found("method", call.method, METHODS)
        if unknown := set(call.params) - {"threshold", "window"}:
            raise invalid(f"params.{min(unknown)}", "unknown; allowed here: threshold, window")
        if not isinstance(call.params.get("window", 1), int):
            raise invalid("params.window", "must be an integer")
        if len(ids) + _most_tokens(call) > CONTEXT:
            raise out_of_range("prompt", f"{len(ids)} tokens; at most {CONTEXT} with max_tokens")
        return text, ids

    def _token(self, token_id: int, place: int, logprobs: int | None) -> TokenOut:
        text = chr(token_id)
        if logprobs is None:
            return TokenOut(token_id, text, self.names[place % 2], TokenKind.DECODED)
        top = tuple((token_id + i, chr(token_id + i), -0.5 - i) for i in range(logprobs))
        return TokenOut(token_id, text, self.names[place % 2], TokenKind.ACCEPTED, -0.5, 1.25, top)

    def _usage(self, call: GenerateCall, num_prompt: int, num_tokens: int, wall_s: float) -> Usage:
        half = num_tokens // 2
        models = {
            self.names[0]: ModelMeter(1000, forwards=half, generated_tokens=num_tokens - half),
            self.names[1]: ModelMeter(2000, forwards=half, generated_tokens=half),
        }
        cost = CostReport(Cost(0.75, 10.0, wall_s), Cost(1.0, 20.0, wall_s), 0.5)
        drafts = SpeculationMeter(2, 5, 4, 3, [2, 2], [2, 1], 0.25, 0.5)
        return Usage(
            num_prompt, num_tokens, 0, models, drafts, 1, cost, call.method or "entropy_adaptive",
            dict(call.params), call.sampling.seed or 7, min(0.001, wall_s), wall_s,
        )  # fmt: skip


def _most_tokens(call: GenerateCall) -> int:
    return call.sampling.max_tokens if "max_tokens" in call.sampling.model_fields_set else UNLIMITED


def _dies(text: str) -> bool:
    once = re.search(r"die_once=(\S+)", text)
    if once is None:
        return "die" in text
    mark = Path(once[1])
    first = not mark.exists()
    mark.touch()
    return first


def load_fake_pool(name: str, config: TurnoutConfig) -> FakePool:
    return FakePool(name, config)


def load_pool(name: str, config: TurnoutConfig) -> Pool:
    return load_engine(name, config) if name == "real" else FakePool(name, config)
