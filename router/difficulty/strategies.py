"""Three ways of answering, and which of them a question calls for (paper #52, DiffAdapt)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a question is answered.

    Attributes:
        name: as the probe calls it.
        temperature: of the answer.
        share: of the caller's most tokens.
        suffix: put after the question, so that the question's cache is used again.
    """

    name: str
    temperature: float
    share: float
    suffix: str


EASY = Strategy("easy", 0.5, 0.4, "\nSolve this directly, then check the result once.")
NORMAL = Strategy("normal", 0.8, 1.0, "\nWork this out step by step.")
HARD = Strategy("hard", 0.4, 0.5, "\nSpend little on this: if no way is in sight, stop and give your best guess.")
STRATEGIES = {each.name: each for each in (EASY, NORMAL, HARD)}


@dataclass(frozen=True, slots=True)
class LabelRule:
    """Which strategy a question would have called for.

    Attributes:
        sure_accuracy: at least this share of right answers, and
        calm_entropy: at most so uncertain (nats): normal.
        lost_accuracy: fewer right answers than this: hard. Everything else is easy.
    """

    sure_accuracy: float = 0.85
    calm_entropy: float = 0.35
    lost_accuracy: float = 0.60

    def label(self, accuracy: float, entropy_bits: float) -> str:
        """Name of the strategy.

        Args:
            accuracy: share of right answers among the model's own samples.
            entropy_bits: their mean entropy over tokens and samples, bits. The paper names no unit; its threshold is
                taken to be in nats.
        """
        if accuracy >= self.sure_accuracy and entropy_bits * log(2.0) <= self.calm_entropy:
            return NORMAL.name
        return HARD.name if accuracy < self.lost_accuracy else EASY.name
