"""What a front end needs from a pool, wherever the pool runs, and what a replica needs from an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from turnout.calls import (
    Chunk,
    Event,
    GenerateCall,
    MethodDescription,
    ModelDescription,
    PoolStats,
    ScoreCall,
    ScoredTokens,
)
from turnout.embed_calls import EmbedCall, Embeddings, TaskAnswer, TaskCall

Batch = tuple[Event, ...]


class PoolMember(Protocol):
    """One model of a pool; `digest` names its weights."""

    @property
    def digest(self) -> str:
        """Digest of the weights."""
        ...


class Pool(Protocol):
    """The engine behind one endpoint, its models in this process or in actors."""

    @property
    def members(self) -> Mapping[str, PoolMember]:
        """Models by name."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Findings of the loading that an operator should know."""
        ...

    def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        """Chunks, then exactly one Usage. Closing the iterator frees everything the call holds."""
        ...

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        ...

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings of texts."""
        ...

    async def task(self, call: TaskCall) -> TaskAnswer:
        """Carry out a task."""
        ...

    def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        ...

    def stats(self) -> PoolStats:
        """What the pool holds right now."""
        ...

    async def tokens(self, call: GenerateCall) -> list[int]:
        """Token ids of a call's prompt or conversation."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        ...

    def send_away(self, count: int) -> int:
        """Let waiting calls go on in another replica; return how many do."""
        ...

    def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts."""
        ...

    def check(self) -> None:
        """Check that the pool can go on.

        Raises:
            TurnoutError: it cannot.
        """
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


class Backend(Protocol):
    """One pool as a front end sees it. Every method raises TurnoutError only."""

    def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        """Batches of events in order, the last of them ending in Usage."""
        ...

    async def complete(self, call: GenerateCall) -> Batch:
        """The whole answer at once: one Chunk per choice, then Usage."""
        ...

    async def score(self, call: ScoreCall) -> list[ScoredTokens]:
        """Log-likelihood of each completion."""
        ...

    async def embed(self, call: EmbedCall) -> Embeddings:
        """Embeddings of texts."""
        ...

    async def task(self, call: TaskCall) -> TaskAnswer:
        """Carry out a task."""
        ...

    async def models(self) -> list[ModelDescription]:
        """The pool first, then its members."""
        ...

    async def methods(self) -> list[MethodDescription]:
        """Decoding methods that the pool's code knows."""
        ...

    async def parts(self, slots: frozenset[str]) -> dict[str, dict[str, Any]]:
        """JSON schemas of the parts that the pool's code knows: by slot, then by name."""
        ...

    async def stats(self) -> list[PoolStats]:
        """What each replica holds right now."""
        ...

    async def tokens(self, call: GenerateCall) -> tuple[tuple[int, ...], str]:
        """What a call gives its models to read, as token ids, and the text of those."""
        ...

    async def forget(self, tenant: str) -> None:
        """Drop what was learned of a tenant's texts, in every replica that answers."""
        ...


def merge(events: list[Event]) -> Batch:
    """Join the chunks of each choice; order within a choice and the final event are kept."""
    if len(events) == 1:
        return tuple(events)
    chunks: dict[int, list[Chunk]] = {}
    others: list[Event] = []
    for event in events:
        if isinstance(event, Chunk):
            chunks.setdefault(event.index, []).append(event)
        else:
            others.append(event)
    return (*(_join(parts) for parts in chunks.values()), *others)


def _join(parts: list[Chunk]) -> Chunk:
    if len(parts) == 1:
        return parts[0]
    return Chunk(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
        finish_reason=parts[-1].finish_reason,
        tool_calls=parts[-1].tool_calls,
        call_parts=tuple(each for part in parts for each in part.call_parts),
        reasoning="".join(part.reasoning for part in parts),
        stop=parts[-1].stop,
        tool_format=parts[0].tool_format,
    )
