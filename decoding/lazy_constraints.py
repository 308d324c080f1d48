"""Constraints asked token by token: of processed scores the best permitted one, without a mask of the vocabulary.

Adaptive rejection (paper #78, AWRS, step 1): tokens are visited in the order of their scores plus Gumbel noise until
one is permitted. With the noise of the masked draw it is the masked draw's token, so nothing that an answer holds
depends on how a constraint was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from decoding.best_tokens import best_tokens
from decoding.logits import allowed_by_structure, keep_allowed
from decoding.processor_chain import chain_of
from decoding.processors.base import NEG_INF
from decoding.processors.temperature import Temperature
from decoding.read_spec import ReadSpec
from decoding.row_context import RowContext

MOST_VISITED = 16  # tokens of a row; then its mask is asked for


def lazy_rows(rows: Rows[RowContext], wants: Rows[ReadSpec]) -> dict[int, RowContext]:
    """Return the rows of which only the token is wanted, and whose constraint is asked token by token.

    Not those whose distribution is read (`probs` is the masked law, exactly, as is what is processed, and what a drawn
    token's surprise comes from), or is cut by its shape: that comes after the mask.
    """
    found = {}
    for place, (row, want) in enumerate(zip(rows, wants, strict=True)):
        constraint = row.seq.constraint
        if constraint is None or not constraint.is_lazy or row.free:
            continue
        if want.probs or want.margin or want.weighs:
            continue
        chain, sampling = chain_of(row.seq), row.seq.sampling
        if want.surprise and not sampling.greedy:
            continue
        after = chain.after_greedy if sampling.greedy else chain.after
        if not sampling.bans_tokens and all(isinstance(link.part, Temperature) for link in after):
            found[place] = row
    return found


def unbound(rows: list[RowContext], lazy: Mapping[int, RowContext]) -> list[RowContext]:
    """Return rows without the structures of those that are asked token by token."""
    return rows if not lazy else [replace(row, free=True) if place in lazy else row for place, row in enumerate(rows)]


def exclude_refused(scores: torch.Tensor, lazy: Mapping[int, RowContext]) -> torch.Tensor:
    """Exclude tokens until the best one of each row may follow.

    Args:
        scores: float32 [rows, vocab], as tokens are chosen by; not modified.
        lazy: rows by their place that a constraint is asked for.

    Returns:
        float32 [rows, vocab]: the arg-max of a row is that of the scores under the constraint's mask.
    """
    given, asked = scores, dict(lazy)
    for _ in range(MOST_VISITED if asked else 0):
        best = best_tokens(scores[list(asked)]).tolist()
        refused = {
            place: token for (place, row), token in zip(asked.items(), best, strict=True) if not _permits(row, token)
        }
        if not refused:
            return scores
        if scores is given:
            scores = given.clone()
        scores[list(refused), list(refused.values())] = NEG_INF
        asked = {place: asked[place] for place in refused}
    if asked:
        places = torch.tensor(list(asked), device=scores.device)
        # A row without a mask is no beginning of what fits: every token may follow, as nothing of it matters.
        slots, masks = allowed_by_structure(list(asked.values()))
        scores[places] = keep_allowed(given[places], slots, masks) if slots else given[places]
    return scores


def _permits(row: RowContext, token: int) -> bool:
    assert row.seq.constraint is not None
    return row.seq.constraint.permits(row.seq.answer, row.path, token)
