"""Similarity of two texts, from 0 to 1: character n-grams, words, common subsequences, equality."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

TextSimilarity = Literal["chrf", "token_f1", "rouge_l", "exact"]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Matrix = list[list[float]]

CHRF_ORDER = 6
CHRF_BETA = 2.0
# Of longer texts the ends are compared, where conclusions stand: one request may compare 64 texts with each other.
MOST_CHARACTERS = 16_384
MOST_WORDS = 2048


def chrf(text: str, reference: str, order: int = CHRF_ORDER, beta: float = CHRF_BETA) -> float:
    """Return chrF (Popovic 2015) as sacrebleu defines it, from 0 to 1.

    Blanks are left out. Precision and recall are averaged over the orders of which both texts have n-grams; their
    F-score weighs recall `beta` times as much. It is not symmetric.
    """
    return _chrf_matrix([text], [reference], order, beta)[0][0]


def token_f1(text: str, reference: str) -> float:
    """Return the F1 of the words of two texts, as in SQuAD, letters as small ones; two without words are equal."""
    return _token_f1_matrix([text], [reference])[0][0]


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words (Lin 2004); two texts without words are equal.

    Of a text with more than `MOST_WORDS` words the last ones count.
    """
    mine, theirs = (each.casefold().split()[-MOST_WORDS:] for each in (text, reference))
    if not mine and not theirs:
        return 1.0
    return 2.0 * common_subsequence(mine, theirs) / (len(mine) + len(theirs))


def exact(text: str, reference: str) -> float:
    """Return 1 for equal texts, else 0."""
    return float(text == reference)


def similarity_matrix(texts: Items[str], references: Items[str], kind: TextSimilarity) -> Matrix:
    """Return the similarity of each text to each reference; equal pairs are computed once.

    Of texts of more than `MOST_CHARACTERS` characters the ends are compared, except by `exact`.
    """
    if kind == "exact":
        return [[exact(text, reference) for reference in references] for text in texts]
    texts, references = ([each[-MOST_CHARACTERS:] for each in group] for group in (texts, references))
    if kind == "chrf":
        return _chrf_matrix(texts, references)
    if kind == "token_f1":
        return _token_f1_matrix(texts, references)
    measure = cache(rouge_l)  # which is symmetric
    return [[measure(*sorted((text, reference))) for reference in references] for text in texts]


async def similarities(texts: Items[str], references: Items[str], kind: TextSimilarity) -> Matrix:
    """Return `similarity_matrix`, computed in a thread: long texts take long."""
    return await asyncio.to_thread(similarity_matrix, texts, references, kind)


def _chrf_matrix(texts: Items[str], references: Items[str], order: int = CHRF_ORDER, beta: float = CHRF_BETA) -> Matrix:
    every, rows, columns = _distinct(texts, references)
    precision, orders = np.zeros((len(every), len(every))), np.zeros((len(every), len(every)))
    grams = first = _numbered(
        [np.frombuffer("".join(each.split()).encode("utf-32-le", "surrogatepass"), np.uint32) for each in every]
    )
    for n in range(1, order + 1):
        if n > 1:  # an n-gram is the number of its first n - 1 characters, and its last one
            kinds = _kinds(first)
            grams = _numbered([left[:-1] * kinds + right[n - 1 :] for left, right in zip(grams, first, strict=True)])
        common, totals = _common(grams)
        precision += common / np.maximum(totals, 1.0)[:, None]
        orders += np.outer(totals > 0, totals > 0)
    precision /= np.maximum(orders, 1.0)
    recall, factor = precision.T, beta * beta
    total = factor * precision + recall
    scores = (1 + factor) * precision * recall / np.where(total > 0.0, total, 1.0)
    found: Matrix = scores[np.ix_(rows, columns)].tolist()
    return found


def _token_f1_matrix(texts: Items[str], references: Items[str]) -> Matrix:
    every, rows, columns = _distinct(texts, references)
    known: dict[str, int] = {}
    words = [[known.setdefault(word, len(known)) for word in each.casefold().split()] for each in every]
    common, totals = _common([np.array(each, dtype=np.int64) for each in words])
    sums = totals[:, None] + totals
    found: Matrix = np.where(sums > 0.0, 2.0 * common / np.maximum(sums, 1.0), 1.0)[np.ix_(rows, columns)].tolist()
    return found


def _distinct(texts: Items[str], references: Items[str]) -> tuple[list[str], list[int], list[int]]:
    """Return all different texts, and the places in them of both groups."""
    every = {each: place for place, each in enumerate(dict.fromkeys((*texts, *references)))}
    return list(every), [every[each] for each in texts], [every[each] for each in references]


def _kinds(ids: list[Ids]) -> int:
    return 1 + max((int(each.max()) for each in ids if len(each)), default=0)


def _numbered(values: Items[npt.NDArray[np.unsignedinteger] | Ids]) -> list[Ids]:
    """Number the distinct values of all arrays together, from 0."""
    if not values:
        return []
    _, numbers = np.unique(np.concatenate(values), return_inverse=True)
    return np.split(numbers.astype(np.int64).reshape(-1), np.cumsum([len(each) for each in values])[:-1])


def _common(grams: list[Ids]) -> tuple[Floats, Floats]:
    """Count what two texts have in common, as often as both have it: [n, n]; and what each has: [n]."""
    counted = [np.unique(ids, return_counts=True) for ids in grams]
    common = np.zeros((len(grams), len(grams)))
    for place, (ids, counts) in enumerate(counted):
        dense = np.zeros(_kinds(grams), dtype=np.int64)
        dense[ids] = counts
        for other, (theirs, times) in enumerate(counted[place:], start=place):
            common[place, other] = common[other, place] = np.minimum(dense[theirs], times).sum()
    return common, np.array([len(ids) for ids in grams], dtype=np.float64)


def common_subsequence(first: list[str], second: list[str]) -> int:
    """Return the length of the longest common subsequence, of bits (Hyyro 2004): a row of the table is one number."""
    places: dict[str, int] = {}
    for place, word in enumerate(second):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(second)) - 1
    row = full  # a bit is 0 where the row's length grows
    for word in first:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(second) - row.bit_count()
