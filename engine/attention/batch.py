"""A ragged batch as attention sees it: where new keys go, which rows see which slots.

Position and slot are separate: masks are made from positions, memory is addressed by slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class SingleRows:
    """Rows that feed one token each: computed together, padded to the longest.

    Attributes:
        rows: [B] row numbers in the batch, or None when the batch is exactly these rows in order.
        blocks: [B * num_blocks] block numbers, row after row, padded with any valid block.
        positions: [B] each row's position; it sees that many tokens and its own.
        num_blocks: blocks per row after padding.
        first_slot: where the only row's blocks start, when B is 1 and they are contiguous.
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    positions: torch.Tensor
    num_blocks: int
    first_slot: int | None
    max_length: int
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, 1, width], made once per step; None when every row sees everything."""
        key = (window, dtype)
        if key not in self._masks:
            self._masks[key] = self._build(window, width, dtype)
        return self._masks[key]

    def _build(self, window: int | None, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self.first_slot is not None and (window is None or self.max_length <= window):
            return None
        column = torch.arange(width, device=self.positions.device)
        seen = column <= self.positions[:, None]
        if window is not None:
            seen &= column > self.positions[:, None] - window
        return _additive(seen, dtype)[:, None, None, :]


@dataclass(slots=True)
class Span:
    """A row of several tokens: a prompt chunk, a catch-up, a draft tree.

    Attributes:
        start: first token's place in the batch.
        count: tokens fed.
        length: cached tokens it may see plus `count`.
        blocks: [n] its blocks, or None when contiguous from `first_slot`.
        first_slot: slot of its first cached token when contiguous.
        positions: [count] positions of the fed tokens.
        tree: bool [k, k] ancestor mask among the last k fed tokens; None when plainly causal.
    """

    start: int
    count: int
    length: int
    blocks: torch.Tensor | None
    first_slot: int
    positions: torch.Tensor
    tree: torch.Tensor | None
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    @property
    def is_plain_prefill(self) -> bool:
        """Whether it is causal from the first token on, with nothing cached before it."""
        return self.tree is None and self.length == self.count

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [count, length]; None when `is_causal` says it all."""
        key = (window, dtype)
        if key not in self._masks:
            self._masks[key] = self._build(window, dtype)
        return self._masks[key]

    def _build(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        if self.is_plain_prefill and (window is None or self.length <= window):
            return None
        device = self.positions.device
        context = self.length - self.count
        seen = torch.ones(self.count, self.length, dtype=torch.bool, device=device)
        seen[:, context:] = torch.ones(self.count, self.count, dtype=torch.bool, device=device).tril()
        if self.tree is not None:
            size = self.tree.shape[0]
            seen[-size:, -size:] = self.tree
        if window is not None:
            keys = torch.cat([torch.arange(context, device=device), self.positions])
            seen &= keys[None, :] > self.positions[:, None] - window
        return _additive(seen, dtype)


@dataclass(slots=True)
class AttentionBatch:
    """One forward's attention work. `slots` [T]: where each fed token's keys and values are written."""

    slots: torch.Tensor
    singles: list[SingleRows]
    spans: list[Span]
    block_size: int


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where seen, -inf elsewhere."""
    shown = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, shown, torch.full_like(shown, float("-inf")))
