"""The constraint protocol: masks of allowed next tokens, and their application to logits."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

# One bit per token, the lowest of the first byte is token 0: whether it may follow. Tokens behind the last may not.
Mask = npt.NDArray[np.uint8]

EIGHT = 8
ALL = 0xFF
# Of a place where every token may follow, those that a constraint does not know as well; compared by identity.
ANY: Mask = np.zeros(0, dtype=np.uint8)


class Constraint(Protocol):
    """Constraint of one answer: which tokens may come next.

    A pure function of the answer's tokens: state of an implementation is only a cache. Calls may
    come from several threads, for models of one request run side by side.

    Attributes:
        end_ids: tokens that end the answer; allowed where the text is complete, and nowhere else.
        vocab_size: tokens that its masks cover.
        failure: why the grammar cannot be followed from where it was asked last; empty where it can.
        remembers: whether masks that it was asked for once are at hand when it is asked again.
    """

    end_ids: frozenset[int]
    vocab_size: int
    failure: str
    remembers: bool

    def masks(self, answer: list[int], paths: Rows[tuple[int, ...]]) -> list[Mask | None]:
        """Return masks of the tokens that may follow each of some continuations of an answer.

        Args:
            answer: its tokens so far.
            paths: hypothetical tokens after it, () for none.

        Returns:
            For each path a mask, which is not to be changed. None where the tokens are no prefix of a text that
            fits, so that nothing that follows matters; `ANY` where every token may follow.
        """
        ...

    def accepts(self, tokens: list[int]) -> bool:
        """Return whether the text of these tokens, without one that ends the answer, fits and is complete."""
        ...

    def clone(self) -> Constraint:
        """Return an independent copy for a twin of the answer."""
        ...


def allows(mask: Mask | None, token: int) -> bool:
    """Return whether a mask allows a token; no mask allows none."""
    if mask is ANY:
        return True
    return mask is not None and token < EIGHT * mask.size and bool(mask[token // EIGHT] >> token % EIGHT & 1)


def is_forced(mask: Mask, vocab_size: int, end_ids: frozenset[int]) -> bool:
    """Return whether a mask leaves no choice below `vocab_size`: one token, or only tokens that end the answer."""
    if mask is ANY:
        return False
    allowed = np.flatnonzero(np.unpackbits(mask, count=vocab_size, bitorder="little"))
    return len(allowed) == 1 or (0 < len(allowed) <= len(end_ids) and end_ids.issuperset(allowed.tolist()))


def keep_allowed(logits: torch.Tensor, slots: list[int], masks: list[Mask]) -> torch.Tensor:
    """Return a copy of logits with -inf for tokens that may not follow.

    Args:
        logits: float32 [rows, vocab], finite or -inf.
        slots: rows that are constrained.
        masks: for each of them; their lengths may differ, from each other and from vocab.
    """
    rows, vocab = logits.shape
    packed = np.full((rows, -(-vocab // EIGHT)), ALL, dtype=np.uint8)
    for slot, mask in zip(slots, masks, strict=True):
        kept = mask[: packed.shape[1]]
        packed[slot, : kept.size] = kept
        packed[slot, kept.size :] = 0
    # Added up from a table of eight numbers for every byte: comparing and choosing costs five times as much.
    places = torch.from_numpy(packed.reshape(-1)).to(logits.device).int()
    bias = _bias(logits.device).index_select(0, places).view(rows, -1)[:, :vocab]
    return bias.add_(logits)


@cache
def _bias(device: torch.device) -> torch.Tensor:
    """Return float32 [256, 8]: the bias of each of a byte's bits, 0 or -inf."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, 0.0, -np.inf).astype(np.float32)).to(device)
