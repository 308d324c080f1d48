"""Features of a prompt's text alone, for a probe that no model has to read for: where all models are elsewhere.

Words and pairs of words are hashed into a vector of fixed length with a sign each, so that collisions cancel out in the
mean (Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", 2009).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain, pairwise
from zlib import crc32

import numpy as np
import numpy.typing as npt

TEXT_FEATURES = ("log_chars", "log_words", "log_lines", "word_chars", "digit_share", "symbol_share", "foreign_share")
NUM_BUCKETS = 512
MOST_CHARS = 16_384  # of a longer text, its two ends: a decision holds the request up
PIECE = re.compile(r"\w+|[^\w\s]")


def read_text(text: str) -> tuple[npt.NDArray[np.float32], dict[str, float]]:
    """Return a text's hashed words, float32 [NUM_BUCKETS] of length 1 or 0, and the numbers in `TEXT_FEATURES`.

    Natural logarithms of its characters, words and lines, each with 1 added; mean characters of a word; shares of its
    characters that are digits, neither letters nor digits nor white space, and not ASCII.
    """
    chars = max(len(text), 1)
    if len(text) > MOST_CHARS:
        text = f"{text[: MOST_CHARS // 2]}\n{text[-MOST_CHARS // 2 :]}"
    pieces = PIECE.findall(text.lower())
    words = [piece for piece in pieces if piece[0].isalnum() or piece[0] == "_"]
    read = max(len(text), 1)
    numbers = (
        math.log1p(chars),
        math.log1p(len(words)),
        math.log1p(text.count("\n")),
        sum(map(len, words)) / max(len(words), 1),
        sum(map(str.isdigit, text)) / read,
        sum(not (char.isalnum() or char.isspace()) for char in text) / read,
        sum(not char.isascii() for char in text) / read,
    )
    grams = chain(pieces, (f"{one} {other}" for one, other in pairwise(pieces)))
    return _hashed(grams), dict(zip(TEXT_FEATURES, numbers, strict=True))


def _hashed(grams: Iterable[str]) -> npt.NDArray[np.float32]:
    vector = np.zeros(NUM_BUCKETS, dtype=np.float32)
    for gram, count in Counter(grams).items():
        code = crc32(gram.encode("utf-8", "replace"))
        vector[code % NUM_BUCKETS] += (1.0 + math.log(count)) * (1.0 if code >> 31 else -1.0)
    return vector / max(float(np.linalg.norm(vector)), 1e-9)
