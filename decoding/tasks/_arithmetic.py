"""Arithmetic coding of tokens by logits, in integers alone: both sides of it count the same.

The paper is #23 (LLMZip). A row of float32 logits becomes integer weights over a grid of differences to the greatest
one: subtraction, a product with a power of two and rounding to a whole number are exact in IEEE arithmetic, and the
exponential is a table of integers. Equal logits so give equal weights on every machine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from turnout.errors import Code, TurnoutError

Weights = npt.NDArray[np.int64]

GRID = 64  # steps of a nat: rounding to them costs some 1e-5 bits of a token
PEAK = 1 << 26  # weight of the most probable token; every token has at least 1
BITS = 64  # of the coder's interval
MASK = (1 << BITS) - 1
LEAST = 1 << (BITS - 8)  # of an interval's width before a token; weights sum to less than 2**44


def _table() -> Weights:
    values: list[int] = []
    while not values or values[-1] > 1:
        values.append(max(int(PEAK * math.exp(-len(values) / GRID)), 1))
    return np.array(values, dtype=np.int64)


TABLE = _table()


def weights_of(logits: npt.NDArray[np.float32]) -> Weights:
    """Integer weights of all tokens, [vocab], from float32 logits.

    Raises:
        TurnoutError: INTERNAL: the logits hold a NaN, or no finite number.
    """
    best = logits.max()
    if not np.isfinite(best):
        raise TurnoutError(Code.INTERNAL, "the model computed logits that are no finite numbers")
    steps = np.rint((best - logits) * np.float32(GRID))
    weights: Weights = TABLE[np.minimum(steps, np.float32(len(TABLE) - 1)).astype(np.int32)]
    return weights


def ideal_bits(logits: npt.NDArray[np.float32], token: int) -> float:
    """Information of a token under the model itself, in bits: -log2 of its probability."""
    exact = logits.astype(np.float64)
    best = exact.max()
    return float((best + math.log(np.exp(exact - best).sum()) - exact[token]) / math.log(2))


class Encoder:
    """Range encoder with carries: an interval of 64 bits, from which bytes leave as soon as they are known."""

    def __init__(self) -> None:
        self._low, self._width = 0, MASK
        self._out = bytearray()

    def encode(self, weights: Weights, token: int) -> None:
        """Code a token."""
        unit = self._width // int(weights.sum())
        self._add(unit * int(weights[:token].sum()))
        self._width = unit * int(weights[token])
        while self._width < LEAST:
            self._out.append(self._low >> (BITS - 8))
            self._low = self._low << 8 & MASK
            self._width <<= 8

    def finish(self) -> bytes:
        """Return the code: the shortest whose continuation by zeros lies in the interval, without zeros at its end."""
        for count in range(BITS // 8 + 1):
            rest = (1 << (BITS - 8 * count)) - 1
            value = (self._low + rest) & ~rest
            if value < self._low + self._width:
                self._add(value - self._low)
                self._out += self._low.to_bytes(BITS // 8, "big")[:count]
                break
        return bytes(self._out).rstrip(b"\0")

    def _add(self, amount: int) -> None:
        self._low += amount
        if self._low > MASK:
            self._low &= MASK
            place = len(self._out) - 1
            while self._out[place] == 0xFF:
                self._out[place] = 0
                place -= 1
            self._out[place] += 1


class Decoder:
    """The other way round.

    Args:
        code: of an `Encoder`.
    """

    def __init__(self, code: bytes) -> None:
        self._code, self._next = code, BITS // 8
        self._value, self._width = int.from_bytes(code[: self._next].ljust(self._next, b"\0"), "big"), MASK

    def decode(self, weights: Weights) -> int:
        """Return the next token; of a code that was not made with these weights, any."""
        ends = weights.cumsum()
        total = int(ends[-1])
        unit = self._width // total
        token = int(np.searchsorted(ends, min(self._value // unit, total - 1), side="right"))
        self._value -= unit * int(ends[token] - weights[token])
        self._width = unit * int(weights[token])
        while self._width < LEAST:
            byte = self._code[self._next] if self._next < len(self._code) else 0
            self._value = (self._value << 8 | byte) & MASK
            self._next += 1
            self._width <<= 8
        return token
