"""What a forward pass costs by: tokens, the positions they attend to, and sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StepTime(Protocol):
    """How long a forward pass takes, learnt from those that were run."""

    def seconds(self, fed: int, attended: int, sequences: int) -> float:
        """Predicted duration in seconds; never falls when an argument grows.

        Args:
            fed: tokens in the forward.
            attended: positions each fed token attends to (cached ones and its own), summed over fed tokens.
            sequences: sequences in the forward.
        """
        ...

    def observe(self, fed: int, attended: int, sequences: int, seconds: float) -> None:
        """Learn from a forward that took so long."""
        ...


def attended_positions(cached: int, fed: int) -> int:
    """Positions attended to, summed over `fed` tokens that follow `cached` ones."""
    return fed * cached + fed * (fed + 1) // 2


@dataclass(slots=True)
class Forward:
    """What a forward pass costs by: see `StepTime`."""

    fed: int = 0
    attended: int = 0
    sequences: int = 0

    def add(self, cached: int, tokens: int) -> None:
        """Add a sequence that feeds `tokens` tokens after its cached ones."""
        self.fed += tokens
        self.attended += attended_positions(cached, tokens)
        self.sequences += 1

    def seconds(self, times: StepTime, cached: int = 0, tokens: int = 0) -> float:
        """Predicted time, with one more sequence when `tokens` are given; an empty forward takes none."""
        fed, sequences = self.fed + tokens, self.sequences + bool(tokens)
        return times.seconds(fed, self.attended + attended_positions(cached, tokens), sequences) if fed else 0.0
