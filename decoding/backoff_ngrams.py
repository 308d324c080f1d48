"""A tri-gram model with Katz back-off, learnt from what a model said."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ORDER = 3
MOST_CONTEXTS = 1 << 16
MOST_TOKENS = 32
# Of a context with its tokens, as Python holds them, where all have been learnt often.
ROW_BYTES = 3000


class BackoffNgrams:
    """Chances of the next token after the last two, backed off to the last one and to none.

    Unseen tokens of a context share d / (d + n) of its mass, with d tokens seen n times in all (Witten and Bell's
    discount), in proportion to their chances after the shorter context. Contexts least recently learnt from are
    forgotten first, and of a context's tokens the rarest.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, ...], dict[int, float]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """About the most bytes that its contexts may take."""
        return ROW_BYTES * len(self._rows)

    def learn(self, before: Sequence[int], chances: Sequence[tuple[int, float]]) -> None:
        """Add expected counts.

        Args:
            before: tokens up to the place; the last two matter.
            chances: tokens with their probabilities there.
        """
        for length in range(ORDER):
            context = _last(before, length)
            row = self._rows.setdefault(context, {})
            self._rows.move_to_end(context)
            for token, chance in chances:
                row[token] = row.get(token, 0.0) + chance
            while len(row) > MOST_TOKENS:
                del row[min(row, key=row.__getitem__)]
        while len(self._rows) > MOST_CONTEXTS:
            self._rows.popitem(last=False)

    def chances(self, before: Sequence[int]) -> dict[int, float]:
        """Probability of each token known after `before`; adds up to one, or is empty where nothing was learnt."""
        chances: dict[int, float] = {}
        for length in range(ORDER):
            row = self._rows.get(_last(before, length))
            if row:
                chances = _back_off(row, chances)
        return chances


def _last(tokens: Sequence[int], length: int) -> tuple[int, ...]:
    return tuple(tokens[-length:]) if length else ()


def _back_off(row: dict[int, float], shorter: dict[int, float]) -> dict[int, float]:
    total = sum(row.values())
    unseen = {token: chance for token, chance in shorter.items() if token not in row}
    rest = sum(unseen.values())
    kept_back = len(row) / (len(row) + total) if rest > 0.0 else 0.0
    chances = {token: (1.0 - kept_back) * count / total for token, count in row.items()}
    for token, chance in unseen.items():
        chances[token] = kept_back * chance / rest
    return chances
