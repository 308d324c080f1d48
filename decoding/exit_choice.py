"""Where to leave a model early, and how far to draft there, from what its layers would have said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def tokens_per_layer(acceptance: float, layer: int, depth: int, num_layers: int) -> float:
    """Expected tokens of a round for each layer it runs through (paper #142, DEL).

    Args:
        acceptance: chance that a drafted token is accepted, given those before it are.
        layer: layers that draft.
        depth: drafted tokens.
        num_layers: of the model.
    """
    tokens = float(depth + 1) if acceptance == 1.0 else (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)
    return tokens / (depth * layer + num_layers)


@dataclass(slots=True)
class Mean:
    """A decayed mean."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, values: list[float], decay: float) -> None:
        """Forget a part of what was, and take in values."""
        self.total = decay * self.total + sum(values)
        self.weight = decay * self.weight + len(values)

    @property
    def value(self) -> float:
        """The mean; there must be something in it."""
        return self.total / self.weight


@dataclass(frozen=True, slots=True)
class Shadow:
    """Shadow draft of a layer at a verified place: whether it agrees with the whole model, and how sure it is."""

    matches: bool
    confidence: float


class ExitChoice:
    """Statistics of every layer of one model over the rounds of an answer (paper #142, DEL).

    Before anything was seen of it, a layer's acceptance rate is taken to be the share of the model below it; that
    counts as one token and is forgotten like the others. The prior is this project's choice.

    Args:
        num_layers: of the model.
        decay: what remains of a round's weight in the next.
    """

    def __init__(self, num_layers: int, decay: float) -> None:
        self._num_layers, self._decay = num_layers, decay
        layers = range(1, num_layers)
        self._matches = {layer: Mean(layer / num_layers, 1.0) for layer in layers}
        self._sure = {(layer, matched): Mean() for layer in layers for matched in (True, False)}

    def observe(self, layer: int, shadows: Iterable[Shadow]) -> None:
        """Observe a layer's shadow drafts at a round's verified places, up to and including the first it missed."""
        shadows = list(shadows)
        self._matches[layer].add([float(each.matches) for each in shadows], self._decay)
        for matched in (True, False):
            sure = [each.confidence for each in shadows if each.matches is matched]
            self._sure[layer, matched].add(sure, self._decay)

    def acceptance(self, layer: int) -> float:
        """Decayed matches over decayed verified tokens."""
        return self._matches[layer].value

    def threshold(self, layer: int) -> float:
        """Confidence below which a draft ends: midway between that of right and of wrong tokens; 0.0: not known."""
        right, wrong = self._sure[layer, True], self._sure[layer, False]
        return (right.value + wrong.value) / 2.0 if right.weight and wrong.weight else 0.0

    def best(self, most: int) -> tuple[int, int]:
        """Exit layer and draft length, up to `most`, with the most expected tokens per layer; (1, 0): no draft."""
        choices = [(layer, depth) for layer in range(1, self._num_layers) for depth in range(most + 1)]

        def worth(choice: tuple[int, int]) -> float:
            layer, depth = choice
            return tokens_per_layer(self.acceptance(layer), layer, depth, self._num_layers)

        return max(choices, key=worth)
