"""Finding a stretch of tokens that repeats itself, by rolling hash."""

from __future__ import annotations

# A Mersenne prime: hashes of different blocks agree about once in 2**61.
MODULUS = (1 << 61) - 1
BASE = 1_000_003 * 998_244_353


class LoopFinder:
    """Watches a token stream for a block that stands several times in a row.

    Hashes of all prefixes make the comparison of two stretches of any length one subtraction each, so that a token
    costs one comparison for each period.

    Args:
        longest: longest block looked for, tokens; the shortest is 1.
        repeats: how often it stands in a row, at least 2.
        least: least tokens of the whole repeated stretch, so that short blocks must repeat more often.
    """

    def __init__(self, longest: int, repeats: int, least: int) -> None:
        if longest < 1 or repeats < 2:
            raise ValueError("a loop is a block of at least one token that stands at least twice")
        self._stretches = [(period, max(repeats, -(-least // period)) * period) for period in range(1, longest + 1)]
        self._hashes = [0]
        self._powers = [1]

    def feed(self, token: int) -> int | None:
        """Take the next token; the period, in tokens, of a loop that it completes, the shortest of several."""
        self._hashes.append((self._hashes[-1] * BASE + token + 1) % MODULUS)
        self._powers.append(self._powers[-1] * BASE % MODULUS)
        end = len(self._hashes) - 1
        for period, length in self._stretches:
            # Equal to itself one period earlier, over all but one block: the block stands length / period times.
            start = end - length
            if start >= 0 and self._hash(start + period, end) == self._hash(start, end - period):
                return period
        return None

    def _hash(self, start: int, end: int) -> int:
        return (self._hashes[end] - self._hashes[start] * self._powers[end - start]) % MODULUS
