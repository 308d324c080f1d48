"""Shapes of a draft model: which depths are tried, and how fast each would be."""

from __future__ import annotations

from training.draft.answers import TargetAnswers
from training.draft.lessons import chain_rounds, guesses
from training.draft.student import Student

PARTS = (15, 8, 5, 3.5)  # a candidate has the target's number of layers over one of these


def candidate_depths(count: int) -> list[int]:
    """Numbers of layers to try for a target of `count`, rising; all of them are fewer where the target has several."""
    return sorted({max(1, round(count / part)) for part in PARTS})


def judged(student: Student, answers: TargetAnswers, depth: int) -> float:
    """Tokens per forward of the target with chains of `depth` along held-out greedy answers."""
    rounds = chain_rounds(guesses(student, answers) == answers.tokens, answers.lengths.tolist(), depth)
    return 1 + sum(rounds) / max(1, len(rounds))


def predicted_speedup(tau: float, depth: int, row_s: float, target_row_s: float, target_chain_s: float) -> float:
    """Speed of chains over plain decoding, from measured times.

    Args:
        tau: tokens per forward of the target.
        depth: of the chain.
        row_s: time of a drafted token.
        target_row_s: time of a forward of the target for one token.
        target_chain_s: the same for a chain and the token before it.
    """
    return tau * target_row_s / (depth * row_s + target_chain_s)
