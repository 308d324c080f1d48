"""Which waiting operations join the next forward pass, and with how many tokens each.

Stall-free batches (seed 239, Sarathi-Serve): operations that need one token (or one draft) first, then prompts
and catch-ups already begun, then new ones, then background work, all within a token budget. Pure decisions: no
tensors, no event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Waiting(Protocol):
    """What the scheduler needs to know about an operation."""

    order: int
    background: bool

    @property
    def remaining(self) -> int:
        """Tokens still to feed, at least 1."""
        ...

    @property
    def atomic(self) -> int:
        """The last so many tokens must be fed together (1, or a draft tree and the token before it)."""
        ...

    @property
    def started(self) -> bool:
        """Whether part of its sequence is cached already."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """One operation's part of a step: index into the given list, and tokens fed."""

    index: int
    tokens: int


def plan_step(waiting: Sequence[Waiting], token_budget: int, max_batch: int) -> list[Share]:
    """Divide one step's token budget.

    Args:
        waiting: operations that could run now.
        token_budget: most tokens in the forward; exceeded only by a single atomic operation larger than it.
        max_batch: most operations in the forward.

    Returns:
        Shares in order of precedence: if memory runs out, the first ones keep theirs.
    """
    ranked = sorted(range(len(waiting)), key=lambda index: _rank(waiting[index]))
    shares: list[Share] = []
    left = token_budget
    for index in ranked:
        if left <= 0 or len(shares) >= max_batch:
            break
        tokens = _chunk(waiting[index], left, alone=not shares)
        if tokens:
            shares.append(Share(index, tokens))
            left -= tokens
    return shares


def _rank(work: Waiting) -> tuple[int, int]:
    if work.background:
        return 3, work.order
    if work.remaining <= work.atomic:
        return 0, work.order
    return (1 if work.started else 2), work.order


def _chunk(work: Waiting, left: int, alone: bool) -> int:
    """Tokens to feed now: all that is left, or a chunk that does not cut the atomic tail."""
    if work.remaining <= left:
        return work.remaining
    before_tail = work.remaining - work.atomic
    if before_tail > 0:
        return min(left, before_tail)
    return work.remaining if alone else 0
