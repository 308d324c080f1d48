"""A backend with scripted answers, chunk by chunk, that keeps the calls it got."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from deployments.backend import Batch, merge
from deployments.metrics import Metrics
from deployments.service import GenerationService
from tests.deployments.in_process import make_config
from tests.deployments.scripted_pool import usage_of
from turnout.calls import Begun, Chunk, GenerateCall, MethodDescription, ModelDescription, PoolStats, ScoreCall, Usage
from turnout.errors import TurnoutError

PROMPT_TOKENS, CACHED_TOKENS, WRITTEN_TOKENS = 7, 3, 5


class ScriptedBackend:
    """Backend with a script, which is the same for every call; an error in it is raised.

    Attributes:
        calls: what was asked.
    """

    def __init__(self, script: Sequence[Chunk | TurnoutError], used: Usage | None = None) -> None:
        self.script, self._used = script, used
        self.calls: list[GenerateCall] = []

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        self.calls.append(call)
        untold = call.include_prompt_len
        for event in self.script:
            if isinstance(event, TurnoutError):
                raise event
            yield (Begun(PROMPT_TOKENS), event) if untold else (event,)
            untold = False
        yield (self.usage(call),)

    def usage(self, call: GenerateCall) -> Usage:
        if self._used is not None:
            return self._used
        counts = {"prompt_tokens": PROMPT_TOKENS, "cached_tokens": CACHED_TOKENS, "completion_tokens": WRITTEN_TOKENS}
        return replace(usage_of(call, 0.5), **counts)

    async def complete(self, call: GenerateCall) -> Batch:
        whole = merge(
            [event async for batch in self.stream(replace(call, include_prompt_len=False)) for event in batch]
        )
        last = next(each for each in reversed(self.script) if isinstance(each, Chunk))
        return tuple(
            replace(event, tool_calls=last.tool_calls) if isinstance(event, Chunk) else event for event in whole
        )

    async def score(self, call: ScoreCall) -> Any:
        raise NotImplementedError

    async def models(self) -> list[ModelDescription]:
        return [ModelDescription("demo", "scripted", 1000, 256, 4096, {}, "plain")]

    async def methods(self) -> list[MethodDescription]:
        return []

    async def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        return {slot: {} for slot in slots}

    async def stats(self) -> list[PoolStats]:
        return []

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str]:
        self.calls.append(call)
        text = "".join(f"<{turn.role}>{turn.content}" for turn in call.messages or ())
        return tuple(text.encode()), text

    async def forget(self, tenant: str) -> None:
        pass


def scripted_service(backend: ScriptedBackend) -> GenerationService:
    return GenerationService(make_config(), {"demo": backend}, Metrics())
