"""A pool whose every token is a function of seed and position, and that does what its prompt says, for replicas that
come and go.

Words in a prompt: `step=S` waits so long before each token, made again or not, `die=N` ends the process at token N,
`die_once=FILE` does so unless FILE exists (and makes it), `interrupt=N` raises Interrupted at token N in the first
process that gets there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

from pool.concurrency import ConcurrencyLimiter
from turnout.calls import (
    Chunk,
    Decided,
    Delivered,
    Event,
    GenerateCall,
    ModelDescription,
    PoolStats,
    Regained,
    ScoreCall,
    ScoredTokens,
    TokenOut,
    Usage,
)
from turnout.config import TurnoutConfig, parse_config
from turnout.cost import Cost, CostReport, SpeculationMeter
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall
from turnout.errors import Code, Interrupted, TurnoutError
from turnout.moved_calls import Moved
from turnout.types import FinishReason, TokenKind

STEP_S = 0.01
INTERRUPTED = "interrupted"


def token_at(seed: int, index: int, place: int, salt: str = "") -> int:
    """Token `place` of answer `index`: a small letter."""
    digest = hashlib.blake2b(f"{seed} {index} {place} {salt}".encode(), digest_size=2).digest()
    return ord("a") + int.from_bytes(digest, "big") % 26


def expected(seed: int, num_tokens: int, index: int = 0, salt: str = "") -> list[int]:
    return [token_at(seed, index, place, salt) for place in range(num_tokens)]


class ScriptedPool:
    def __init__(self, name: str, config: TurnoutConfig) -> None:
        self.members: dict[str, Any] = {}
        self.notes: list[str] = []
        self.name = name
        self.block_size = config.engine.block_size
        self.active: dict[str, asyncio.Event] = {}
        pool = config.pools[name]
        self.folder = Path(pool.artifacts or ".")
        self.places = ConcurrencyLimiter(name, pool.max_ongoing_requests, pool.max_queued_requests)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        async with self.places.hold(call.tenant, call.deadline_s, stays=call.moved is not None):
            async for event in self._answer(call):
                yield event

    async def _answer(self, call: GenerateCall) -> AsyncIterator[Event]:
        started = perf_counter()
        words = dict(word.split("=", 1) for word in _text(call).split() if "=" in word)
        seed = call.sampling.seed
        assert seed is not None
        salt = ""
        if call.include_decision:
            salt = (call.decided or {}).get("arm") or f"decided by {os.getpid()}"
            yield Decided({"method": "plain", "params": {}, "policy": "test", "version": "0", "arm": salt})
        leave = self.active[call.request_id] = asyncio.Event()
        delivered = call.delivered or (Delivered(),) * call.sampling.n
        try:
            for place in range(call.sampling.max_tokens):
                for index, before in enumerate(delivered):
                    token = token_at(seed, index, place, salt)
                    if place < len(before.tokens):
                        await self._wait(words)
                        if place == index == 0:
                            yield Regained()
                        if before.tokens[place] != token:
                            raise TurnoutError(Code.INTERNAL, "a replay that disagrees")
                        continue
                    await self._obey(words, place, call.request_id)
                    if leave.is_set():
                        raise Interrupted("handed over", Moved())
                    last = place == call.sampling.max_tokens - 1
                    out = TokenOut(token, chr(token), f"pid {os.getpid()}", TokenKind.DECODED)
                    yield Chunk(index, chr(token), (out,), FinishReason.LENGTH if last else None)
            yield usage_of(call, perf_counter() - started)
        finally:
            del self.active[call.request_id]

    async def _obey(self, words: dict[str, str], place: int, request_id: str) -> None:
        await self._wait(words)
        self._end(words, place, request_id)

    async def _wait(self, words: dict[str, str]) -> None:
        await asyncio.sleep(float(words.get("step", STEP_S)))

    def _end(self, words: dict[str, str], place: int, request_id: str) -> None:
        if place == int(words.get("die", -1)):
            os._exit(1)
        once = Path(words.get("die_once", os.sep))
        if not once.exists():
            once.touch()
            os._exit(1)
        if place == int(words.get("interrupt", -1)):
            mark = self.folder / f"{INTERRUPTED}-{request_id}"
            if not mark.exists():
                mark.touch()
                raise Interrupted("an actor has ended")

    def hand_over(self, request_id: str | None = None, again: bool = False) -> int:
        """See `pool.pool.Pool.hand_over`."""
        leaving = [event for name, event in self.active.items() if request_id in (None, name)]
        for event in leaving:
            event.set()
        if leaving:
            (self.folder / f"handed-{os.getpid()}").touch()
        return len(leaving)

    def send_away(self, count: int) -> int:
        """See `pool.pool.Pool.send_away`."""
        return self.places.send_away(count)

    def forget(self, tenant: str) -> None:
        """See `pool.pool.Pool.forget`."""
        (self.folder / f"forgot-{tenant}-{os.getpid()}").touch()

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        await self._obey(dict(word.split("=", 1) for word in str(call.prompt).split() if "=" in word), 0, "")
        token = TokenOut(1, "x", f"pid {os.getpid()}", TokenKind.DECODED, -0.5)
        return [ScoredTokens((token,), (True,)) for _ in call.completions]

    async def embed(self, call: EmbedCall) -> Embeddings:
        raise NotImplementedError

    async def task(self, call: TaskCall) -> TaskAnswer:
        raise NotImplementedError

    def models(self) -> list[ModelDescription]:
        return [ModelDescription(self.name, "scripted", 1000, 256, 4096, {}, "plain")]

    def stats(self) -> PoolStats:
        active = len(self.active)
        calls = self.places.num_held + self.places.num_waiting
        return PoolStats(calls, active, active, 0, 1000, 0, 0.0, {}, prompt_token_s=1e-3)

    async def tokens(self, call: GenerateCall) -> list[int]:
        assert isinstance(call.prompt, str)
        return list(call.prompt.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def check(self) -> None:
        """See `actors.pool.ActorPool.check`."""
        if (self.folder / f"sick-{os.getpid()}").exists():
            raise TurnoutError(Code.UNAVAILABLE, "it cannot go on")

    async def close(self) -> None:
        pass


def load_scripted(name: str, config: TurnoutConfig) -> ScriptedPool:
    return ScriptedPool(name, config)


def scripted_config(folder: Path, grace_s: float = 1.0, **pool: object) -> TurnoutConfig:
    """One scripted pool, `p`; `folder` is where it leaves marks."""
    return parse_config(
        {
            "models": {"small": {"path": "none"}, "large": {"path": "none"}},
            "pools": {"p": {"small": "small", "large": "large", "artifacts": str(folder), **pool}},
            "server": {"request_timeout_s": 60, "shutdown_grace_s": grace_s},
        }
    )


def _text(call: GenerateCall) -> str:
    if call.messages is not None:
        return " ".join(turn.content for turn in call.messages)
    return call.prompt if isinstance(call.prompt, str) else ""


def usage_of(call: GenerateCall, wall_s: float) -> Usage:
    cost = CostReport(Cost(0.5, 1.0, wall_s), Cost(1.0, 2.0, wall_s), 0.5)
    seed = call.sampling.seed
    assert seed is not None
    num_tokens = call.sampling.max_tokens * call.sampling.n
    return Usage(1, num_tokens, 0, {}, SpeculationMeter(), 0, cost, "plain", {}, seed, wall_s / 2, wall_s)
