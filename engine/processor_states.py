"""Hidden states for logits processors: what of a forward is handed to them, and what is kept of a sequence's tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from decoding.block import Block
from decoding.partial_forward import WHOLE
from decoding.processor_chain import chain_of, reads_of
from decoding.processors.base import NOTHING
from decoding.read_spec import ReadSpec
from decoding.row_context import RowContext
from decoding.step_states import LAST, StepStates
from engine.attention.layout import Int32

if TYPE_CHECKING:
    from engine.cache.table import BlockTable
    from engine.runner import Feed

MISSING = -1


def reads_layers(table: BlockTable) -> bool:
    """Return whether the processors of a sequence read hidden states, so that all layers must run in one forward."""
    reads = reads_of(table.seq, table.pool.num_layers)
    return bool(reads.hidden or reads.before)


def first_without_states(table: BlockTable) -> int:
    """Return the first token of a sequence whose hidden states its processors read and are not known."""
    seq, pool = table.seq, table.pool
    layers = reads_of(seq, pool.num_layers).before
    if not layers:
        return sys.maxsize
    past = chain_of(seq).past
    past.settle(seq.tokens)
    return min(past.known(pool.model, layer) for layer in layers)


def lacks_last(table: BlockTable) -> bool:
    """Return whether exactly the last token is not cached, and all states that its processors read are known."""
    return table.lacks_last() and not (table.seq.sampling.processors and first_without_states(table) < len(table))


def processors_read(feeds: Sequence[Feed]) -> ReadSpec:
    """Return what the processors of the sequences that are fed read, all together."""
    found = NOTHING
    for feed in feeds:
        if feed.table.seq.sampling.processors:
            reads = reads_of(feed.table.seq, feed.table.pool.num_layers)
            found = found | (reads if feed.reads else replace(reads, hidden=NOTHING.hidden))
    return found


class ProcessorStates:
    """Hidden states of one forward, for processors.

    Args:
        feeds: of the forward.
        reads: of their processors.
        taps: outputs of layers, by layer, [tokens, hidden].
        starts: rows starts[i] to starts[i + 1] are feed i's.
        normed: the last norm over some tokens, int64 [n] -> [n, hidden].
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        reads: ReadSpec,
        taps: Mapping[int, torch.Tensor],
        starts: Int32,
        normed: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._feeds, self._reads, self._taps, self._starts = feeds, reads, taps, starts
        self._pool = feeds[0].table.pool  # one model's
        self._fed = {layer: taps[layer] for layer in reads.before & taps.keys()}
        if LAST in reads.before:
            self._fed[LAST] = normed(torch.arange(int(starts[-1])))

    def keep(self) -> None:
        """Keep the states of the sequences' own tokens where a processor reads all of them."""
        for place, feed in enumerate(self._feeds) if self._fed else ():
            seq, start = feed.table.seq, len(feed.table)
            layers = reads_of(seq, self._pool.num_layers).before
            if feed.depth != WHOLE or feed.partial is not None or not layers:
                continue
            own, fed = min(start + len(feed.tokens) - feed.num_rows, len(seq)), start + len(feed.tokens)
            first, past, model = int(self._starts[place]) - start, chain_of(seq).past, self._pool.model
            at = max(own, start)
            block = Block.chain(tuple(feed.tokens[at - start :])) if feed.block is None else feed.block
            for layer in layers & self._fed.keys():
                states = self._fed[layer]
                if start < own:
                    past.put(model, layer, start, states[first + start : first + own])
                if at < fed and not feed.cached_rows:  # hypothetical ones, which may be written
                    past.hold(model, layer, at, block, states[first + at : first + fed])

    def of_rows(
        self, picked: torch.Tensor, normed: torch.Tensor, head: Callable[[torch.Tensor, bool], torch.Tensor]
    ) -> StepStates:
        """Return what processors of the rows that are read see.

        Args:
            picked: int64 [R], the rows' tokens.
            normed: [R, hidden] before the head.
            head: see `StepStates.head`.
        """
        layers = self._reads.hidden
        rows = {layer: self._taps[layer].index_select(0, picked).float() for layer in layers & self._taps.keys()}
        if LAST in layers:
            rows[LAST] = normed.float()
        paths: tuple[tuple[int, ...], ...] = ()
        if self._fed:
            starts = self._starts.tolist()
            paths = tuple(
                _path(feed, index, context, starts[place])
                for place, feed in enumerate(self._feeds)
                for index, context, _ in feed.reads
            )
        return StepStates(self._pool.model, self._pool.num_layers, rows, head, self._fed, paths)


def _path(feed: Feed, index: int, context: RowContext, start: int) -> tuple[int, ...]:
    """Places among all tokens of the forward of the hypothetical tokens before a row, that of the row included."""
    count, block = len(context.path), feed.block
    if not count or feed.partial is not None:
        return (MISSING,) * count
    if block is None or block.is_chain:
        places = list(range(index - count + 1, index + 1))
    else:
        first = len(feed.tokens) - feed.num_rows  # of the block's rows that are fed
        row = index - first + feed.cached_rows
        seen = block.seen()[row].nonzero()[:, 0].tolist()
        places = [first + each - feed.cached_rows if each >= feed.cached_rows else MISSING for each in seen][-count:]
    return tuple(start + each if each >= 0 else MISSING for each in places)
