"""Context of a row of logits: whose it is, and what is assumed to be written before it."""

from __future__ import annotations

from dataclasses import dataclass

from decoding.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RowContext:
    """Context of a row: the sequence, and the hypothetical tokens (a draft path) after its last one.

    Attributes:
        free: whether it only drafts: what the sequence is constrained to does not hold for it.
        at: its position, where the sequence may have grown since; None: the sequence says it.
    """

    seq: Sequence
    path: tuple[int, ...] = ()
    free: bool = False
    at: int | None = None

    @property
    def position(self) -> int:
        """Absolute position of the token this row chooses."""
        return len(self.seq) + len(self.path) if self.at is None else self.at

    @property
    def tokens(self) -> list[int]:
        """Prompt, answer and path."""
        return [*self.seq.tokens, *self.path]
