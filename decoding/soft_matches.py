"""Differentiable n-gram matching: how well soft tokens contain given tokens, wherever these stand (paper #74)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

NGram = tuple[int, ...]


def match(logp: torch.Tensor, forms: Iterable[NGram]) -> torch.Tensor:
    """Score the best places of an n-gram in soft tokens.

    At each place, an n-gram has the mean log-probability of its tokens there. The score is the mean of these over all
    places of all forms, weighted by their softmax.

    Args:
        logp: [chains, length, vocab] log-probabilities of soft tokens.
        forms: ways to write it, each at least one token; longer ones than `length` count for nothing.

    Returns:
        [chains], at most 0, nats a token; 0 where no form is short enough.
    """
    length = logp.shape[1]
    found = []
    for form in forms:
        places = length - len(form) + 1
        if places > 0:
            columns = logp[..., list(form)]  # first: the gradient of each slice is as large as what it is cut from
            found.append(torch.stack([columns[:, at : at + places, at] for at in range(len(form))]).mean(0))
    if not found:
        return logp.new_zeros(len(logp))
    scores = torch.cat(found, -1)
    return (scores.softmax(-1) * scores).sum(-1)


def ngrams(tokens: tuple[int, ...], sizes: Iterable[int]) -> tuple[NGram, ...]:
    """Return the different n-grams of some sizes, in the order in which they stand."""
    found = (tokens[at : at + size] for size in sizes for at in range(len(tokens) - size + 1))
    return tuple(dict.fromkeys(found))


def similarity(logp: torch.Tensor, grams: Iterable[NGram]) -> torch.Tensor:
    """Mean of the scores of n-grams (see `match`): [chains]; 0 where there are none."""
    length, by_size = logp.shape[1], dict[int, list[NGram]]()
    for gram in grams:
        if len(gram) <= length:
            by_size.setdefault(len(gram), []).append(gram)
    if not by_size:
        return logp.new_zeros(len(logp))
    scores = []
    for size, each in by_size.items():  # all of a size at once: a request may have thousands
        places, columns = length - size + 1, torch.tensor(each, device=logp.device).T
        found = torch.stack([logp[:, at : at + places][..., ids] for at, ids in enumerate(columns)]).mean(0)
        scores.append((found.softmax(1) * found).sum(1))
    return torch.cat(scores, -1).mean(-1)
