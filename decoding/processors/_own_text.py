"""What of a row's own text a processor looks at: candidates of a row, and continuations of the tokens before it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import islice

import torch

from decoding.processors.base import NEG_INF, Batch
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
        self._reading = threading.Lock()  # models on several devices read rows of one sequence

    def at(self, context: RowContext) -> list[dict[int, int]]:
        """Counts of what followed the row's last 0, 1, ..., order - 1 tokens; {} where the text is shorter.

        The dicts are not to be modified.
        """
        tokens = context.seq.tokens
        with self._reading:
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


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most probable tokens of each row, as many as it asks for; of equally probable ones, the first.

    Attributes:
        tokens: of each row, ascending.
        probs: float32 [n], the probabilities of all of them, row by row.
    """

    tokens: list[list[int]]
    probs: torch.Tensor
    _places: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, logits: torch.Tensor, sizes: Rows[int], batch: Batch) -> Candidates:
        """Of rows [rows, vocab], `sizes` of each; excluded tokens are none."""
        probs = logits.softmax(-1)
        vocab = probs.shape[-1]
        wanted = batch.tensor([min(size, vocab) for size in sizes], torch.int64)
        last = probs.topk(min(max(sizes), vocab), dim=-1).values.gather(-1, wanted - 1)
        kept, equal = probs > last, probs == last
        # Not as `topk` picks among equal ones: that depends on how many other rows ask for.
        equal &= equal.cumsum(-1) <= wanted - kept.sum(-1, keepdim=True)
        kept = (kept | equal) & logits.isfinite()
        rows, tokens = kept.nonzero(as_tuple=True)
        flat = iter(tokens.tolist())
        by_row = [list(islice(flat, count)) for count in kept.sum(-1).tolist()]
        return cls(by_row, probs[rows, tokens], (rows, tokens))

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """A value a row, [rows, 1], at its candidates: [n]."""
        return values[:, 0][self._places[0]]

    def rerank(self, logits: torch.Tensor, scores: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Where a row is `active`, [rows, 1]: candidates get scores, float32 [n], other tokens are excluded."""
        ranked = torch.full_like(logits, NEG_INF).index_put(self._places, scores)
        return torch.where(active, ranked, logits)
