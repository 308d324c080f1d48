"""How many tokens one model drafts in the time in which another one verifies."""

from __future__ import annotations

from decoding.lengths.base import Round
from decoding.model import Model
from decoding.sequence import Sequence

# Where nothing is known of the models' times: what PEARL's own scripts mostly use.
USUAL = 4
# Share of the newest measurement in what is believed.
NEW = 0.25


class Pace:
    """Blocks that take as long to draft as the block before takes to verify (seed 130, PEARL).

    At first from what the models predict of their steps, then from the waits this answer has measured: these contain
    what the models do for others, and the way to them.

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

    @property
    def block(self) -> int:
        """Tokens of the next block."""
        if self._fixed is not None:
            return self._fixed
        if self._token_s <= 0.0 or self._verify_s <= 0.0:
            return min(USUAL, self._most)
        return min(max(round(self._verify_s / self._token_s), 1), self._most)

    def observe(self, drafted: int, draft_s: float, verify_s: float) -> None:
        """What a round took, in seconds, and how many tokens were drafted in it."""
        self._rounds += 1
        if drafted == 0 or self._rounds == 1:  # the first reads the prompt
            return
        share = NEW if self._rounds > 2 else 1.0
        self._token_s += share * (draft_s / drafted - self._token_s)
        self._verify_s += share * (verify_s - self._verify_s)
