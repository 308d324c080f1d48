"""Similarity of two texts, from 0 to 1: character n-grams, words, common subsequences, equality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Literal

TextSimilarity = Literal["chrf", "token_f1", "rouge_l", "exact"]

CHRF_ORDER = 6
CHRF_BETA = 2.0


def chrf(text: str, reference: str, order: int = CHRF_ORDER, beta: float = CHRF_BETA) -> float:
    """Return chrF (Popovic 2015) as sacrebleu defines it, from 0 to 1.

    Blanks are left out. Precision and recall are averaged over the orders of which both texts have n-grams; their
    F-score weighs recall `beta` times as much. It is not symmetric.
    """
    mine, theirs = "".join(text.split()), "".join(reference.split())
    precision = recall = 0.0
    orders = 0
    for n in range(1, order + 1):
        found, wanted = _ngrams(mine, n), _ngrams(theirs, n)
        if found and wanted:
            common = (found & wanted).total()
            precision += common / found.total()
            recall += common / wanted.total()
            orders += 1
    if not precision + recall:
        return 0.0
    precision, recall = precision / orders, recall / orders
    factor = beta * beta
    return (1 + factor) * precision * recall / (factor * precision + recall)


def token_f1(text: str, reference: str) -> float:
    """Return the F1 of the words of two texts, as in SQuAD, letters as small ones; two without words are equal."""
    mine, theirs = Counter(text.casefold().split()), Counter(reference.casefold().split())
    common = (mine & theirs).total()
    if not mine and not theirs:
        return 1.0
    return 2.0 * common / (mine.total() + theirs.total())


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words (Lin 2004); two texts without words are equal."""
    mine, theirs = text.casefold().split(), reference.casefold().split()
    if not mine and not theirs:
        return 1.0
    return 2.0 * _common_subsequence(mine, theirs) / (len(mine) + len(theirs))


def exact(text: str, reference: str) -> float:
    """Return 1 for equal texts, else 0."""
    return float(text == reference)


SIMILARITIES: dict[TextSimilarity, Callable[[str, str], float]] = {
    "chrf": chrf, "token_f1": token_f1, "rouge_l": rouge_l, "exact": exact,
}  # fmt: skip


def similarity_matrix(texts: Items[str], references: Items[str], kind: TextSimilarity) -> list[list[float]]:
    """Return the similarity of each text to each reference; equal pairs are computed once."""
    known: dict[tuple[str, str], float] = {}
    measure = SIMILARITIES[kind]
    for text in texts:
        for reference in references:
            if (text, reference) not in known:
                known[text, reference] = measure(text, reference)
    return [[known[text, reference] for reference in references] for text in texts]


def _ngrams(text: str, n: int) -> Counter[str]:
    return Counter(text[start : start + n] for start in range(len(text) - n + 1))


def _common_subsequence(first: list[str], second: list[str]) -> int:
    lengths = [0] * (len(second) + 1)
    for word in first:
        before = 0
        for place, other in enumerate(second, start=1):
            above = lengths[place]
            lengths[place] = before + 1 if word == other else max(above, lengths[place - 1])
            before = above
    return lengths[-1]
