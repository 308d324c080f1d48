"""The one comparison of exactness tests: equal tokens, except where rounding alone may decide.

float32 logits move by about 1e-5 with the shape of a batch. So a first divergence is excused only where both
tokens are within `TIE_NATS` of the best score there, noise included, by an independent forward of the prefix they
share; it is counted, and the count is printed after the run. A wrong token is never excused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TIE_NATS = 1e-4

# Scores (processed log-probabilities plus noise, nats) of all tokens [vocab], at a place in the answer.
ScoresAt = Callable[[int], torch.Tensor]

excused: list[str] = []


def assert_same_tokens(expected: Sequence[int], got: Sequence[int], scores_at: ScoresAt, label: str = "") -> None:
    """Fail unless the two answers are equal up to a tie.

    Args:
        expected: tokens of one way to answer.
        got: of the other.
        scores_at: scores at a place, recomputed from the tokens `expected` has before it.
        label: names the comparison in messages.
    """
    places = [i for i, (mine, theirs) in enumerate(zip(expected, got, strict=False)) if mine != theirs]
    if not places:
        assert len(expected) == len(got), f"{label}: {len(got)} tokens, expected {len(expected)}"
        return
    place = places[0]
    for token in (expected[place], got[place]):
        assert_best(token, scores_at(place), f"{label}: token {place}")
    excused.append(f"{label}: token {place}: {expected[place]} or {got[place]}")


def assert_best(token: int, scores: torch.Tensor, label: str = "") -> None:
    """Fail unless a token has the best score, or is within `TIE_NATS` of it."""
    behind = float(scores.max() - scores[token])
    assert behind < TIE_NATS, f"{label}: {token} is {behind:.5f} nats behind {int(scores.argmax())}"
