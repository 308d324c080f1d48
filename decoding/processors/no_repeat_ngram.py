"""No repeated n-gram: tokens that would complete an n-gram of prompt and answer a second time are excluded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Rows
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field

from decoding.processors.base import NEG_INF, Batch, LogitsProcessor, Stage
from decoding.row_context import RowContext
from turnout.registry import MethodParams


class NoRepeatNgramParams(MethodParams):
    """Parameters."""

    n: Annotated[int, Field(ge=0, le=64, description="tokens of an n-gram; 0 is off")] = 3


class NoRepeatNgram(LogitsProcessor):
    """See the module. Where that would exclude every token, nothing is excluded."""

    Params = NoRepeatNgramParams
    params: NoRepeatNgramParams
    stage = Stage.TRUNCATE
    off: ClassVar = {"n": 0}

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self._followers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self._read = 0  # tokens of the sequence whose n-grams are known

    @classmethod
    def apply(cls, logits: torch.Tensor, parts: Rows[Self], batch: Batch) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        gone = [part._excluded(context) for part, context in zip(parts, batch.contexts, strict=True)]
        rows = [row for row, tokens in enumerate(gone) for _ in tokens]
        if not rows:
            return logits
        mask = torch.zeros_like(logits, dtype=torch.bool)
        mask[rows, [token for tokens in gone for token in tokens]] = True
        some_left = (logits.isfinite() & ~mask).any(-1, keepdim=True)
        return logits.masked_fill(mask & some_left, NEG_INF)

    def _excluded(self, context: RowContext) -> set[int]:
        n, tokens = self.params.n, context.seq.tokens
        if n == 0:
            return set()
        for end in range(max(self._read, n - 1), len(tokens)):
            self._followers[tuple(tokens[end - n + 1 : end])].add(tokens[end])
        self._read = len(tokens)
        near = [*tokens[-n + 1 :], *context.path] if n > 1 else list(context.path)
        if len(near) < n - 1:
            return set()
        last = tuple(near[len(near) - n + 1 :])
        found = set(self._followers.get(last, ()))
        # n-grams that end inside the path: their first token may be one of the sequence's last.
        recent = [*tokens[max(0, len(tokens) - n + 1) :], *context.path]
        for end in range(len(recent) - len(context.path), len(recent)):
            if end >= n - 1 and tuple(recent[end - n + 1 : end]) == last:
                found.add(recent[end])
        return found


PART = NoRepeatNgram
