"""One ragged forward pass of one model: from fed tokens to rows read from the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from decoding.block import Block
from decoding.mask_prefetch import MaskPrefetch, spares_core
from decoding.model import Readout, ReadSpec
from decoding.partial_forward import WHOLE, Exit, LayerSelection
from decoding.readout import read
from decoding.row_context import RowContext
from decoding.step_states import LAST
from engine.attention.layout import Int32, Layout, lay_out
from engine.cache.paged_kv import PagedKV
from engine.cache.table import BlockTable
from engine.loaded_model import LoadedModel
from engine.processor_states import ProcessorStates, processors_read
from engine.token_batch import TokenBatch

if TYPE_CHECKING:
    from engine.reuse.reused_spans import Partial


@dataclass(slots=True)
class Feed:
    """One sequence's part of a forward pass. Slots for it have been reserved.

    Attributes:
        table: its cache; the tokens go after the cached ones.
        tokens: what to feed; with `block`, its rows from `cached_rows` on are the last ones.
        block: rows that stay apart from the cached tokens.
        cached_rows: the block's first rows whose KV is in the slots after the cached tokens.
        reads: (index in `tokens`, whose row, what to read), in order.
        depth: the layers these tokens run through.
        states: [tokens, hidden] what goes into the first of these layers, unless that is 0; where `keeps_states`, what
            came out of the last one.
        exit: what stands between the last of these layers and the head, in place of the last norm.
        traced: layers whose output is wanted at every token.
        traces: what came out of those of them that ran: layer -> [tokens, hidden].
        pooled: the tokens whose hidden states before the head are summed; None: none are.
        pooled_sum: their sum, float64 [hidden].
        partial: what of this need not be computed, because it is taken over from elsewhere; None: all of it is.
    """

    table: BlockTable
    tokens: list[int]
    block: Block | None = None
    cached_rows: int = 0
    reads: list[tuple[int, RowContext, ReadSpec]] = field(default_factory=list)
    depth: LayerSelection = WHOLE
    states: torch.Tensor | None = None
    exit: Exit | None = None
    traced: frozenset[int] = frozenset()
    traces: dict[int, torch.Tensor] = field(default_factory=dict)
    pooled: slice | None = None
    pooled_sum: torch.Tensor | None = None
    partial: Partial | None = None

    @property
    def num_rows(self) -> int:
        """How many of the tokens are rows of the block."""
        return 0 if self.block is None else len(self.block) - self.cached_rows

    @property
    def keeps_states(self) -> bool:
        """Whether a later forward may go on behind the layers of this one."""
        return self.depth.is_prefix


class Runner:
    """Runs forwards of one model on its device. Not thread-safe: one forward at a time.

    Args:
        plan: the model's layers.
        store: its KV tensors.
        block_size: tokens per block.
        device: where the model lives.
    """

    def __init__(self, plan: LoadedModel, store: PagedKV, block_size: int, device: torch.device) -> None:
        self.plan = plan
        self.store = store
        self.block_size = block_size
        self.device = device
        self._ahead = MaskPrefetch(partial(spares_core, device))

    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed]) -> Sequence[list[Readout]]:
        """Feed every sequence's tokens in one forward, or one for each set of layers; KV lands in the reserved slots.

        Returns:
            For each feed, the rows it asked for.
        """
        if isinstance(feeds, TokenBatch):
            return self._run_tokens(feeds)
        bound = [
            history
            for feed in feeds
            if feed.table.seq.constraint is not None
            for _, history, want in feed.reads
            if (want.chooses or want.entropy) and want.among is None
        ]
        with self._ahead.of(bound):
            return self._run_all(feeds)

    def _run_all(self, feeds: Sequence[Feed]) -> list[list[Readout]]:
        first = feeds[0].depth
        if all(feed.depth is first for feed in feeds):
            return self._run(feeds, first)
        depths = list(dict.fromkeys(feed.depth for feed in feeds))
        rows: dict[int, list[Readout]] = {}
        for depth in depths:
            places = [place for place, feed in enumerate(feeds) if feed.depth == depth]
            rows |= zip(places, self._run([feeds[place] for place in places], depth), strict=True)
        return [rows[place] for place in range(len(feeds))]

    @torch.inference_mode()
    def read(self, states: torch.Tensor, histories: list[RowContext], want: ReadSpec, normed: bool) -> list[Readout]:
        """Read hidden states [R, hidden] as if they stood before the head; `normed`: as if after the last norm."""
        states = states.to(self.device)
        if not normed:
            states = self.plan.stack.norm(states.contiguous(), torch.arange(len(states), device=self.device))
        return read(self.plan.logits(states.to(self.plan.dtype), want.among), histories, [want] * len(histories))

    def _run(self, feeds: Sequence[Feed], depth: LayerSelection) -> list[list[Readout]]:
        layout = self._lay_out(feeds)
        step = self.plan.backend.step(layout, self.store)
        starts = layout.starts.tolist()
        places = [starts[i] + index for i, feed in enumerate(feeds) for index, _, _ in feed.reads]
        # Sent to the device now: after the layers, the copy would wait for them. The host does not wait: the
        # memory is pinned.
        picked = torch.tensor(places, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        picked = picked.to(self.device, non_blocking=True)
        states = None if depth.first == 0 else torch.cat([feed.states for feed in feeds if feed.states is not None])
        hidden, taps = self.plan.stack.hidden(layout, step, self.tapped(feeds), depth, states)
        return self._deliver(feeds, hidden, taps, layout.starts, picked)

    def _deliver(
        self,
        feeds: Sequence[Feed],
        hidden: torch.Tensor,
        taps: dict[int, torch.Tensor],
        starts: Int32,
        picked: torch.Tensor,
    ) -> list[list[Readout]]:
        """Hand out what came out of the layers: rows starts[i] to starts[i + 1] are feed i's, `picked` are read."""
        keeps_states = feeds[0].keeps_states  # one depth: all or none
        kept = keeps_states or taps or any(feed.pooled is not None for feed in feeds)
        for place, feed in enumerate(feeds) if kept else ():
            if keeps_states:
                feed.states = hidden[starts[place] : starts[place + 1]].clone()
            for layer in feed.traced & taps.keys():
                feed.traces[layer] = taps[layer][starts[place] : starts[place + 1]].clone()
            if feed.pooled is not None:
                pooled = range(int(starts[place]), int(starts[place + 1]))[feed.pooled]
                normed = self.plan.stack.norm(hidden, torch.arange(pooled.start, pooled.stop, device=self.device))
                feed.pooled_sum = normed.sum(0, dtype=torch.float64)
        seen, reads = None, processors_read(feeds)
        if reads.hidden or reads.before:
            norm = self.plan.stack.norm
            seen = ProcessorStates(feeds, reads, taps, starts, lambda each: norm(hidden, each.to(self.device)))
            seen.keep()
        if not len(picked):
            return [[] for _ in feeds]
        rows = self._read(feeds, hidden, taps, picked, seen)
        answer, at = [], 0
        for feed in feeds:
            answer.append(rows[at : at + len(feed.reads)])
            at += len(feed.reads)
        return answer

    def _read(
        self,
        feeds: Sequence[Feed],
        hidden: torch.Tensor,
        taps: dict[int, torch.Tensor],
        picked: torch.Tensor,
        seen: ProcessorStates | None,
    ) -> list[Readout]:
        normed = self.plan.stack.norm(hidden, picked)
        _leave(feeds, hidden, picked, normed)
        wants = [want for feed in feeds for _, _, want in feed.reads]
        histories = [history for feed in feeds for _, history, _ in feed.reads]
        kinds = list({id(want): want for want in wants}.values())  # most rows want the same
        if any(want.reads_logits for want in kinds):
            reads = None
            if seen is not None:  # before processors run
                reads = seen.of_rows(picked, normed, self._head)
            rows = read(self._logits(normed, wants), histories, wants, reads)
        else:
            rows = [Readout() for _ in wants]
        wanted = frozenset(layer for want in kinds for layer in want.hidden)
        states = {layer: taps[layer].index_select(0, picked).float() for layer in wanted & taps.keys()}
        if LAST in wanted:
            states[LAST] = normed.float()
        for layer, values in states.items():
            for row, want, state in zip(rows, wants, values.unbind(), strict=True):
                if layer in want.hidden:
                    row.hidden[layer] = state
        return rows

    def _head(self, states: torch.Tensor, normed: bool) -> torch.Tensor:
        """Logits of states [n, hidden], through the last norm where it is asked for; float32 [n, vocab_size]."""
        if normed:
            states = self.plan.stack.norm(states.contiguous(), torch.arange(len(states), device=self.device))
        return self.plan.logits(states.to(self.plan.dtype))

    def _logits(self, normed: torch.Tensor, wants: list[ReadSpec]) -> torch.Tensor:
        """[R, vocab_size], of each row at least the ids it is read over."""
        parts = dict.fromkeys(want.among for want in wants)
        if len(parts) == 1:
            return self.plan.logits(normed, *parts)
        logits = torch.empty(len(normed), self.plan.vocab_size, device=normed.device)
        for among in parts:
            rows = torch.tensor([row for row, want in enumerate(wants) if want.among is among], device=normed.device)
            logits[rows] = self.plan.logits(normed[rows], among)
        return logits

    def tapped(self, feeds: Sequence[Feed]) -> frozenset[int]:
        """Return the layers whose output is wanted."""
        wanted = [want.hidden for feed in feeds for _, _, want in feed.reads if want.hidden]
        own = processors_read(feeds)
        every = (*wanted, *(feed.traced for feed in feeds), own.hidden, own.before)
        return frozenset(layer for layers in every for layer in layers if layer != LAST)

    def _run_tokens(self, batch: TokenBatch) -> Sequence[list[Readout]]:
        layout = self._lay_out(batch)
        step = self.plan.backend.step(layout, self.store)
        hidden, _ = self.plan.stack.hidden(layout, step, frozenset(), WHOLE, None)
        return self._draw(batch, hidden)

    def _draw(self, batch: TokenBatch, hidden: torch.Tensor) -> Sequence[list[Readout]]:
        return batch.read(self.plan.logits(self.plan.stack.norm(hidden, batch.picked)))

    def _lay_out(self, feeds: Sequence[Feed]) -> Layout:
        if isinstance(feeds, TokenBatch):
            return feeds.layout()
        trees = {
            index: (feed.block.seen()[feed.cached_rows :], feed.block.positions[feed.cached_rows :])
            for index, feed in enumerate(feeds)
            if feed.block is not None and not feed.block.is_chain
        }
        return lay_out(
            [token for feed in feeds for token in feed.tokens],
            [len(feed.tokens) for feed in feeds],
            [len(feed.table) + feed.cached_rows for feed in feeds],
            [feed.table.block_array for feed in feeds],
            self.block_size,
            trees,
            [feed.table.offset for feed in feeds],
            [feed.table.content.rope_length for feed in feeds],
        )


def _leave(feeds: Sequence[Feed], hidden: torch.Tensor, picked: torch.Tensor, normed: torch.Tensor) -> None:
    """Where a feed has an exit, put what comes out of it in place of the normed states."""
    at = 0
    for feed in feeds if any(feed.exit is not None for feed in feeds) else ():
        rows = slice(at, at + len(feed.reads))
        at = rows.stop
        if feed.exit is not None and feed.reads:
            normed[rows] = feed.exit(hidden[picked[rows]].to("cpu", torch.float32)).to(normed)
