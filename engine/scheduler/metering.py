"""Metering of forwards: every fed token is put into one of the classes of its sequence's meter."""

from __future__ import annotations

from decoding.partial_forward import WHOLE
from engine.cache.table import BlockTable
from engine.runner import Feed
from engine.scheduler.queued_operation import QueuedOperation
from turnout.cost import ModelMeter


def meter(work: QueuedOperation, feed: Feed, name: str, num_parameters: int, num_layers: int) -> None:
    """Count what an operation fed; the cache is still as before the forward.

    Args:
        work: the operation.
        feed: its part of the forward.
        name: of the model.
        num_parameters: of the model.
        num_layers: of the model.
    """
    seq, table = work.table.seq, work.table
    counts = seq.meter.of(name, num_parameters)
    counts.forwards += 1
    start, fed = len(table), len(feed.tokens)
    prompt = max(min(seq.num_prompt_tokens - start, fed), 0)
    real = max(min(len(seq) - start, fed), 0)
    decode = 1 if not work.background and real > prompt and start + fed >= len(seq) else 0
    counts.prompt_tokens += prompt
    counts.decode_tokens += decode
    counts.catchup_tokens += real - prompt - decode
    counts.draft_tokens += fed - real
    if feed.depth is not WHOLE and feed.depth != WHOLE:
        counts.spared_tokens += fed * (1 - feed.depth.runs(num_layers) / num_layers)
    if feed.partial is not None:
        counts.spared_tokens += feed.partial.spared
    _count_found(counts, table)


def meter_tokens(work: QueuedOperation, fed: int, name: str, num_parameters: int) -> None:
    """Count tokens of a decode loop that were fed one by one, each the last of its sequence."""
    counts = work.table.seq.meter.of(name, num_parameters)
    counts.forwards += fed
    counts.decode_tokens += fed
    _count_found(counts, work.table)


def _count_found(counts: ModelMeter, table: BlockTable) -> None:
    counts.cached_tokens = table.cached_on_arrival
    counts.fetched_tokens = table.origin.on_arrival
