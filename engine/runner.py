"""One ragged forward pass of one model: from fed tokens to rows read from the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from decoding.logits import History
from decoding.model import Row, Want
from decoding.readout import read
from decoding.tree import DraftTree
from engine.attention.batch import AttentionBatch, SingleRows, Span
from engine.attention.paged import AttentionStep
from engine.cache.store import KVStore
from engine.cache.table import BlockTable
from engine.plan import LayerPlan


@dataclass(slots=True)
class Feed:
    """One sequence's part of a forward pass. Slots for it have been reserved.

    Attributes:
        table: its cache; the tokens go after the cached ones.
        tokens: what to feed; with `tree`, the last `len(tree)` are the tree's nodes.
        tree: the draft being verified.
        reads: (index in `tokens`, whose row, what to read), in order.
    """

    table: BlockTable
    tokens: list[int]
    tree: DraftTree | None = None
    reads: list[tuple[int, History, Want]] = field(default_factory=list)

    def positions(self) -> list[int]:
        """Absolute position of each fed token: its place in the sequence, or its depth in the tree."""
        start = len(self.table)
        if self.tree is None:
            return list(range(start, start + len(self.tokens)))
        root = start + len(self.tokens) - len(self.tree)
        depths = [0] * len(self.tree)
        for node, parent in enumerate(self.tree.parents):
            depths[node] = 0 if parent < 0 else depths[parent] + 1
        return [*range(start, root), *(root + depth for depth in depths)]


class Runner:
    """Runs forwards of one model on its device. Not thread-safe: one forward at a time.

    Args:
        plan: the model's layers.
        store: its KV tensors.
        block_size: tokens per block.
        device: where the model lives.
    """

    def __init__(self, plan: LayerPlan, store: KVStore, block_size: int, device: torch.device) -> None:
        self.plan = plan
        self.store = store
        self.block_size = block_size
        self.device = device

    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed]) -> list[list[Row]]:
        """Feed every sequence's tokens in one forward; the KV lands in the reserved slots.

        Returns:
            For each feed, the rows it asked for.
        """
        tokens = [token for feed in feeds for token in feed.tokens]
        places = [position for feed in feeds for position in feed.positions()]
        positions = torch.tensor(places, device=self.device)
        step = AttentionStep(self._attention_batch(feeds, positions), self.store)
        ids = torch.tensor(tokens, device=self.device)
        hidden, taps = self.plan.hidden(ids, positions, max(places), step, _tapped(feeds))
        picked: list[int] = []
        start = 0
        for feed in feeds:
            picked.extend(start + index for index, _, _ in feed.reads)
            start += len(feed.tokens)
        if not picked:
            return [[] for _ in feeds]
        rows = self._read(feeds, hidden, taps, picked)
        answer, at = [], 0
        for feed in feeds:
            answer.append(rows[at : at + len(feed.reads)])
            at += len(feed.reads)
        return answer

    def _read(
        self, feeds: Sequence[Feed], hidden: torch.Tensor, taps: dict[int, torch.Tensor], picked: list[int]
    ) -> list[Row]:
        whole = len(picked) == hidden.shape[0]
        index = torch.tensor(picked, device=self.device)
        normed = self.plan.norm(hidden if whole else hidden.index_select(0, index))
        wants = [want for feed in feeds for _, _, want in feed.reads]
        histories = [history for feed in feeds for _, history, _ in feed.reads]
        rows = read(self.plan.logits(normed), histories, wants)
        for place, want in enumerate(wants):
            if want.hidden is not None:
                source = normed[place] if want.hidden == -1 else taps[want.hidden][picked[place]]
                rows[place].hidden = source.float()
        return rows

    def _attention_batch(self, feeds: Sequence[Feed], positions: torch.Tensor) -> AttentionBatch:
        slots = [slot for feed in feeds for slot in feed.table.slots(len(feed.table), len(feed.tokens))]
        starts = np.cumsum([0, *(len(feed.tokens) for feed in feeds)])
        single = [i for i, feed in enumerate(feeds) if len(feed.tokens) == 1]
        spans = [self._span(feed, int(starts[i]), positions) for i, feed in enumerate(feeds) if len(feed.tokens) > 1]
        groups = [
            self._singles([feeds[i] for i in group], [int(starts[i]) for i in group], positions, len(positions))
            for group in _by_width(single, [feeds[i].table for i in single])
        ]
        return AttentionBatch(torch.tensor(slots, device=self.device), groups, spans, self.block_size)

    def _singles(self, feeds: list[Feed], starts: list[int], positions: torch.Tensor, total: int) -> SingleRows:
        lengths = [len(feed.table) + 1 for feed in feeds]
        width = -(-max(lengths) // self.block_size)
        blocks = np.zeros((len(feeds), width), dtype=np.int64)
        for row, feed in enumerate(feeds):
            used = -(-lengths[row] // self.block_size)
            blocks[row, :used] = feed.table.block_array[:used]
        first = _first_slot(blocks[0], self.block_size) if len(feeds) == 1 else None
        whole = len(feeds) == total
        rows = None if whole else torch.tensor(starts, device=self.device)
        return SingleRows(
            rows=rows,
            blocks=torch.from_numpy(blocks.reshape(-1)).to(self.device),
            positions=positions if whole else positions[rows],
            num_blocks=width,
            first_slot=first,
            max_length=max(lengths),
        )

    def _span(self, feed: Feed, start: int, positions: torch.Tensor) -> Span:
        count = len(feed.tokens)
        length = len(feed.table) + count
        used = -(-length // self.block_size)
        blocks = feed.table.block_array[:used]
        first = _first_slot(blocks, self.block_size)
        tree = feed.tree
        return Span(
            start=start,
            count=count,
            length=length,
            blocks=None if first is not None else torch.from_numpy(blocks.copy()).to(self.device),
            first_slot=first or 0,
            positions=positions[start : start + count],
            tree=None if tree is None or tree.is_chain else tree.ancestor_mask().to(self.device),
        )


def _first_slot(blocks: np.ndarray, block_size: int) -> int | None:
    """The first slot when the blocks follow each other in memory."""
    if len(blocks) > 1 and (np.diff(blocks) != 1).any():
        return None
    return int(blocks[0]) * block_size


def _by_width(indices: list[int], tables: list[BlockTable]) -> list[list[int]]:
    """Group rows so that padding at most doubles a row: by the power of two above their number of blocks."""
    groups: dict[int, list[int]] = {}
    for index, table in zip(indices, tables, strict=True):
        groups.setdefault(len(table.blocks).bit_length(), []).append(index)
    return list(groups.values())


def _tapped(feeds: Sequence[Feed]) -> frozenset[int]:
    wanted = (want.hidden for feed in feeds for _, _, want in feed.reads)
    return frozenset(layer for layer in wanted if layer is not None and layer >= 0)
