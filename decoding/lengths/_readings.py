"""Readings that length policies take from the rows of a draft."""

from __future__ import annotations

import math

from decoding.model import Readout


def entropy_nats(row: Readout) -> float:
    """Entropy of the draft distribution before temperature, in nats; over the tokens a structure allows.

    Raises:
        ValueError: the drafter did not read what the policy wants.
    """
    if row.entropy_bits is None:
        raise ValueError("the draft model must read the entropy of every drafted token")
    return row.entropy_bits * math.log(2.0)


def top_probability(row: Readout) -> float:
    """Probability of the most probable token, under the raw draft distribution.

    Raises:
        ValueError: the drafter did not read what the policy wants.
    """
    if not row.top:
        raise ValueError("the draft model must read the most probable token at every drafted token")
    return math.exp(row.top[0][1])
