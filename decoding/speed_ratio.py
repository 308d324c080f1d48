"""Speed ratio: tokens that one model drafts in the time in which another one verifies."""

from __future__ import annotations

from collections import deque
from statistics import median

from decoding.lengths.base import Round
from decoding.model import Model
from decoding.sequence import Sequence

# Where nothing is known of the models' times: what PEARL's own scripts mostly use.
USUAL = 4
RECENT = 7  # rounds whose median is believed: a change of pace is followed after half as many


class Pace:
    """Blocks that take as long to draft as the block before takes to verify (paper #130, PEARL).

    At first from what the models predict of their steps, then from the waits this answer has measured: these contain
    what the models do for others, and the way to them. The median of the last waits counts, so that one stall does not
    make blocks long for the rest of the answer.

    Args:
        seq: the answer.
        small: drafts.
        large: verifies.
        most: longest block, in tokens.
        fixed: the length of every block; None: as above.
    """

    def __init__(self, seq: Sequence, small: Model, large: Model, most: int, fixed: int | None = None) -> None:
        self._most = most
        self._fixed = fixed
        self._rounds = 0
        now = Round(seq, small, large, free=False, drafter="model_chain")
        self._token_s = now.draft_s() or small.step_seconds()
        self._verify_s = now.target_s(USUAL) or large.step_seconds()
        self._tokens_s: deque[float] = deque(maxlen=RECENT)
        self._verifies_s: deque[float] = deque(maxlen=RECENT)

    @property
    def block(self) -> int:
        """Tokens of the next block."""
        if self._fixed is not None:
            return self._fixed
        if self._token_s <= 0.0 or self._verify_s <= 0.0:
            return min(USUAL, self._most)
        return min(max(round(self._verify_s / self._token_s), 1), self._most)

    def observe(self, drafted: int, draft_s: float, verify_s: float) -> None:
        """Observe a round's time, in seconds, and the number of tokens drafted in it."""
        self._rounds += 1
        if drafted == 0 or self._rounds == 1:  # the first reads the prompt
            return
        self._tokens_s.append(draft_s / drafted)
        self._verifies_s.append(verify_s)
        self._token_s, self._verify_s = median(self._tokens_s), median(self._verifies_s)
