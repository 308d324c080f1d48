"""What a new prompt may take over from others that its model has seen, and remembering it for those that follow.

A prompt is a source only for those who may find its blocks: which namespace a block belongs to decides, as it does for
equal prefixes. Source: paper #222, "KVShare: An LLM Service System with Efficient and Effective Multi-Tenant KV Cache
Reuse".
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable

import numpy as np

from decoding.processor_chain import reads_of
from decoding.sequence import Sequence
from engine.cache.blocks import BlockPool
from engine.cache.table import BlockTable
from engine.reuse.index import PromptIndex, SeenPrompt
from engine.reuse.matcher import Int64, common_runs
from engine.reuse.partial_rows import Bools
from engine.reuse.reused_spans import Published, Reused, Span
from engine.reuse.settings import ReuseSettings
from turnout.types import Namespace

# Prompts are remembered up to this multiple of the tokens that the pool holds.
MAX_POOLS = 4


class SpanReuse:
    """One model's memory of prompts.

    Args:
        settings: what counts as alike, and what is computed again.
        pool: where the prompts' blocks are.

    Attributes:
        lookups: sequences that asked.
        hits: of these, those that found something.
    """

    def __init__(self, settings: ReuseSettings, pool: BlockPool) -> None:
        self.settings = settings
        self.lookups = 0
        self.hits = 0
        self._pool = pool
        # Of what was seen longer ago than this, nothing is left in the pool.
        self._index = PromptIndex(settings.max_prompts, MAX_POOLS * pool.num_blocks * pool.block_size)
        self._least = settings.min_run or pool.block_size

    async def fill(self, table: BlockTable) -> None:
        """Before a sequence's first operation, when its exact prefix is known: decide what it takes over.

        A sequence that may be inexact gets the spans it shares with prompts seen before. One that takes nothing over
        is remembered: its blocks will be found by their content once they are computed. One with a salt does neither.
        """
        if table.arrival is not None or table.reused is not None:
            return
        if table.seq.sharing.salt:
            return
        if table.seq.lossy and not reads_of(table.seq, table.pool.num_layers).before:
            spans = await self._find(table)
            if spans and table.arrival is None and table.reused is None and not table.released:
                self.hits += 1
                take_over(table, Reused(spans, table.seq.num_prompt_tokens, self.settings))
                return
        self._remember(table)

    async def _find(self, table: BlockTable) -> list[Span]:
        self.lookups += 1
        seq = table.seq
        exact = len(table.match_prefix()) * self._pool.block_size
        if seq.num_prompt_tokens - 1 - exact < self._least:
            return []
        tokens = np.asarray(seq.tokens[exact : seq.num_prompt_tokens], dtype=np.int64)
        settings = self.settings
        visible = may_see(seq)
        prompts = self._index.similar(tokens, visible, settings.min_similarity, settings.max_sources)
        sources = [(prompt, self._available(prompt, visible)) for prompt in prompts]
        return await asyncio.to_thread(self._align, tokens, exact, sources) if sources else []

    def _available(self, prompt: SeenPrompt, visible: _Sees) -> Bools:
        """Which of its tokens are in blocks that may be seen and are there."""
        blocks = [
            visible(namespace) and self._pool.find(content) is not None
            for namespace, content in zip(prompt.namespaces, prompt.hashes, strict=True)
        ]
        return np.repeat(np.asarray(blocks, dtype=np.bool_), prompt.block_size)

    def _align(self, tokens: Int64, exact: int, sources: Iterable[tuple[SeenPrompt, Bools]]) -> list[Span]:
        """Spans from the most similar prompt, then from the next one for what is left."""
        spans: list[Span] = []
        left = [(0, len(tokens))]
        for prompt, available in sources:
            source = Published(self._pool, prompt.hashes)
            still: list[tuple[int, int]] = []
            for first, end in left:
                at = first
                for run in common_runs(tokens[first:end], prompt.tokens, available, self._least):
                    start = first + run.start
                    spans.append(Span(exact + start, run.origin, run.length, source))
                    still.append((at, start))
                    at = start + run.length
                still.append((at, end))
            left = [(first, end) for first, end in still if end - first >= self._least]
        return sorted(spans, key=lambda span: span.start)

    def _remember(self, table: BlockTable) -> None:
        """Its prompt is a source from now on, as far as it is computed exactly."""
        seq, size = table.seq, self._pool.block_size
        count = seq.num_prompt_tokens // size
        if table.content.tainted_from is not None:
            count = min(count, table.content.tainted_from // size)
        if count:
            hashes = tuple(table.content.first(count)[:count])
            namespaces = tuple(seq.sharing.namespace((index + 1) * size) for index in range(count))
            tokens = np.asarray(seq.tokens[: count * size], dtype=np.int64)
            self._index.add(SeenPrompt(tokens, hashes, namespaces))


class _Sees:
    """Whether a block of this namespace may be used."""

    def __init__(self, own: frozenset[Namespace]) -> None:
        self._own = own

    def __call__(self, namespace: Namespace) -> bool:
        return namespace.policy == "public" or namespace in self._own


def may_see(seq: Sequence) -> _Sees:
    """What a sequence may use: its own namespaces, and what is public."""
    return _Sees(frozenset([seq.sharing.rest, *(namespace for _, namespace in seq.sharing.spans)]))


def take_over(table: BlockTable, reused: Reused) -> None:
    """Let a table that nothing was computed for yet have these spans; whatever follows the first is inexact."""
    size = table.pool.block_size
    start = reused.spans[0].start // size * size
    tainted = table.content.tainted_from
    table.content.taint(start if tainted is None else min(tainted, start))
    table.reused = reused
    # Nothing of it is offered to others, nor are they asked for what would come before it.
    table.origin.sought, table.origin.watcher, table.origin.watch_at = True, None, sys.maxsize
