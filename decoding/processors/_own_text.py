"""What of a row's own text a processor looks at: candidates of a row, and continuations of the tokens before it."""

from __future__ import annotations

from collections import defaultdict

import torch

from decoding.processors.base import NEG_INF
from decoding.row_context import RowContext


class Continuations:
    """How often each token followed each context of up to `order` - 1 tokens, in prompt and answer.

    Counts of the sequence are kept and grow with it; those of a hypothetical path are added for one look.

    Args:
        order: greatest length of an n-gram, its last token included.
    """

    def __init__(self, order: int) -> None:
        self.order = order
        self._counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        self._read = 0

    def at(self, context: RowContext) -> list[dict[int, int]]:
        """Counts of what followed the row's last 0, 1, ..., order - 1 tokens; {} where the text is shorter.

        The dicts are not to be modified.
        """
        tokens = context.seq.tokens
        self._read_until(tokens)
        recent = [*tokens[max(0, len(tokens) - self.order + 1) :], *context.path]
        found: list[dict[int, int]] = []
        for size in range(self.order):
            if size > len(recent):
                found.append({})
                continue
            last = tuple(recent[len(recent) - size :])
            found.append(self._with_path(last, recent, len(context.path)))
        return found

    def _read_until(self, tokens: list[int]) -> None:
        for place in range(self._read, len(tokens)):
            for size in range(min(self.order, place + 1)):
                followers = self._counts[tuple(tokens[place - size : place])]
                followers[tokens[place]] = followers.get(tokens[place], 0) + 1
        self._read = len(tokens)

    def _with_path(self, last: tuple[int, ...], recent: list[int], new: int) -> dict[int, int]:
        """Counts after `last`, with those of the `new` last tokens of `recent`."""
        counts = self._counts.get(last, {})
        added = [
            recent[place]
            for place in range(len(recent) - new, len(recent))
            if place >= len(last) and tuple(recent[place - len(last) : place]) == last
        ]
        if added:
            counts = dict(counts)
            for token in added:
                counts[token] = counts.get(token, 0) + 1
        return counts


def rerank(logits: torch.Tensor, candidates: torch.Tensor, scores: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Rows in which candidates have new scores and other tokens are excluded.

    Args:
        logits: float32 [rows, vocab].
        candidates: int64 [rows, k].
        scores: float32 [rows, k].
        active: bool [rows, 1]; other rows are left as they are.
    """
    scores = scores.masked_fill(~logits.gather(-1, candidates).isfinite(), NEG_INF)
    return torch.where(active, torch.full_like(logits, NEG_INF).scatter(-1, candidates, scores), logits)
