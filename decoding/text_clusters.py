"""Clusters of texts by the words in them: TF-IDF vectors and k-means, seeded."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence as Items

import torch

from decoding.noise import Purpose, noise_key, uniform

WORD = re.compile(r"(?u)\b\w\w+\b")
STARTS = 10
MOST_ROUNDS = 100
MOST_WORDS = 4096


def tf_idf(texts: Items[str]) -> torch.Tensor:
    """Return TF-IDF vectors as scikit-learn's `TfidfVectorizer` defines them by default.

    Words of two letters or more, as small letters; idf = ln((1 + n) / (1 + df)) + 1; each row of length 1. Of more than
    `MOST_WORDS` words, those in most texts count.

    Returns:
        float64 [n, words], words sorted; a text without words is all zeros; at least one column.
    """
    counts = [Counter(WORD.findall(text.lower())) for text in texts]
    found = Counter(word for each in counts for word in each)
    known = sorted(found, key=lambda word: (-found[word], word))[:MOST_WORDS]
    column = {word: place for place, word in enumerate(sorted(known))}
    vectors = torch.zeros((len(texts), max(len(column), 1)), dtype=torch.float64)
    for row, each in zip(vectors, counts, strict=True):
        for word in each.keys() & column.keys():
            row[column[word]] = each[word] * (math.log((1 + len(texts)) / (1 + found[word])) + 1)
    return torch.nn.functional.normalize(vectors, dim=1)


def k_means(points: torch.Tensor, clusters: int, seed: int) -> list[int]:
    """Return the cluster of each point: the best of a few runs from centres drawn as k-means++ does.

    Args:
        points: float64 [n, d], n >= 1.
        clusters: at most; equal points are in one.
        seed: of the first centres.

    Returns:
        Numbers from 0, in the order in which clusters first occur.
    """
    count = min(clusters, len(torch.unique(points, dim=0)))
    runs = [_run(points, count, seed, start) for start in range(STARTS)]
    labels = min(runs, key=lambda run: run[0])[1]
    names: dict[int, int] = {}
    return [names.setdefault(label, len(names)) for label in labels]


def _run(points: torch.Tensor, count: int, seed: int, start: int) -> tuple[float, list[int]]:
    """Sum of squared distances to the centres, and the cluster of each point."""
    centres = _first_centres(points, count, seed, start)
    labels = torch.full((len(points),), -1)
    for _ in range(MOST_ROUNDS):
        nearest = _squares(points, centres).argmin(1)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        for label in range(count):
            if bool((labels == label).any()):
                centres[label] = points[labels == label].mean(0)
    return float((points - centres[labels]).square().sum()), labels.tolist()


def _first_centres(points: torch.Tensor, count: int, seed: int, start: int) -> torch.Tensor:
    """One point by chance, then each with a chance that grows with the square of its distance to those so far."""
    weights = torch.ones(len(points), dtype=torch.float64)
    chosen: list[int] = []
    for place in range(count):
        sums = weights.cumsum(0)
        at = uniform(noise_key(seed, place, Purpose.SELECT, start)) * float(sums[-1])
        chosen.append(min(int(torch.searchsorted(sums, at, right=True)), len(points) - 1))
        weights = _squares(points, points[chosen]).min(1).values
    return points[chosen].clone()


def _squares(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Squared distances: [n, k]. By differences: equal points are exactly 0 apart. Centre by centre, for the memory."""
    return torch.stack([(points - centre).square().sum(-1) for centre in centres], 1)
