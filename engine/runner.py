"""One ragged forward pass of one model: from fed tokens to rows read from the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from decoding.logits import History
from decoding.model import Row, Want
from decoding.readout import read
from decoding.tree import DraftTree
from engine.attention.layout import Layout, lay_out
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
        layout = self._lay_out(feeds)
        step = self.plan.backend.step(layout, self.store)
        starts = layout.starts.tolist()
        places = [starts[i] + index for i, feed in enumerate(feeds) for index, _, _ in feed.reads]
        # Sent to the device now: after the layers, the copy would wait for them.
        picked = torch.tensor(places, dtype=torch.int64, device=self.device)
        hidden, taps = self.plan.stack.hidden(layout, step, _tapped(feeds))
        if not places:
            return [[] for _ in feeds]
        rows = self._read(feeds, hidden, taps, picked)
        answer, at = [], 0
        for feed in feeds:
            answer.append(rows[at : at + len(feed.reads)])
            at += len(feed.reads)
        return answer

    def _read(
        self, feeds: Sequence[Feed], hidden: torch.Tensor, taps: dict[int, torch.Tensor], picked: torch.Tensor
    ) -> list[Row]:
        normed = self.plan.stack.norm(hidden, picked)
        wants = [want for feed in feeds for _, _, want in feed.reads]
        histories = [history for feed in feeds for _, history, _ in feed.reads]
        rows = read(self.plan.logits(normed), histories, wants)
        for place, want in enumerate(wants):
            if want.hidden is not None:
                source = normed[place] if want.hidden == -1 else taps[want.hidden][picked[place]]
                rows[place].hidden = source.float()
        return rows

    def _lay_out(self, feeds: Sequence[Feed]) -> Layout:
        trees = {
            index: (feed.tree.ancestor_mask(), feed.tree.depths())
            for index, feed in enumerate(feeds)
            if feed.tree is not None and not feed.tree.is_chain
        }
        return lay_out(
            [token for feed in feeds for token in feed.tokens],
            [len(feed.tokens) for feed in feeds],
            [len(feed.table) for feed in feeds],
            [feed.table.block_array for feed in feeds],
            self.block_size,
            trees,
        )


def _tapped(feeds: Sequence[Feed]) -> frozenset[int]:
    wanted = (want.hidden for feed in feeds for _, _, want in feed.reads)
    return frozenset(layer for layer in wanted if layer is not None and layer >= 0)
