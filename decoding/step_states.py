"""Hidden states that logits processors read: those of a step's rows, and those kept of a sequence's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

LAST = -1  # before the head, after the last norm
HIDDEN_AT_FIRST = 64  # tokens that room is made for


class PastStates:
    """Hidden states of a sequence's tokens, by model and layer: from the first token on, as far as they are known.

    A state depends on the tokens up to its own alone, and a sequence only grows: what is known stays right.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}

    def known(self, model: str, layer: int) -> int:
        """Return how many of the first tokens have their states here.

        Args:
            model: digest of the model.
            layer: see `ReadSpec.hidden`.
        """
        held = self._held.get((model, layer))
        return 0 if held is None else held[1]

    def put(self, model: str, layer: int, start: int, states: torch.Tensor) -> None:
        """Take the states, [n, width], of the tokens from `start` on; left out where those before are not known."""
        count, end = self.known(model, layer), start + len(states)
        if start > count or end <= count:
            return
        held, _ = self._held.get((model, layer), (states.new_empty(HIDDEN_AT_FIRST, states.shape[1]), 0))
        if end > len(held):
            grown = held.new_empty(2 * end, held.shape[1])
            grown[:count] = held[:count]
            held = grown
        held[count:end] = states[count - start :]
        self._held[model, layer] = (held, end)

    def of(self, model: str, layer: int) -> torch.Tensor | None:
        """Return the states of the first tokens, [known, width], not to be modified; None: of none."""
        held = self._held.get((model, layer))
        return None if held is None else held[0][: held[1]]


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """Hidden states of the rows of a step; layers that did not run, or that no row's processors read, are missing.

    Attributes:
        model: digest of the model.
        num_layers: of the model.
        rows: by layer (see `ReadSpec.hidden`), [rows, width] after the token of each row.
        head: [n, width] before the head, and whether they still need the last norm -> float32 [n, vocab].
        fed: by layer of `ReadSpec.before`, [tokens, width] of all tokens of the forward.
        paths: of each row, places in `fed` of its hypothetical tokens, in their order; -1: not in this forward. Empty
            where nothing of `fed` is wanted.
    """

    model: str
    num_layers: int
    rows: Mapping[int, torch.Tensor]
    head: Callable[[torch.Tensor, bool], torch.Tensor]
    fed: Mapping[int, torch.Tensor] = field(default_factory=dict)
    paths: tuple[tuple[int, ...], ...] = ()

    def picked(self, places: list[int]) -> StepStates:
        """Return those of some of the rows."""
        rows = {layer: states[places] for layer, states in self.rows.items()}
        return replace(self, rows=rows, paths=tuple(self.paths[each] for each in places) if self.paths else ())
