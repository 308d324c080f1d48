"""Hidden states that logits processors read: those of a step's rows, and those kept of a sequence's tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from decoding.block import Block

LAST = -1  # before the head, after the last norm
ROOM_AT_FIRST = 64  # tokens
MOST_PARTS = 8  # that a layer's states are shared with forks in


@dataclass(slots=True)
class _Layer:
    """States of one layer: parts that are shared with forks, and never written again, and its own after them.

    Attributes:
        own: [room, width], of which the first `count` are states.
        count: see `own`.
        shared: [n, width] each.
        before: states in `shared`.
    """

    own: torch.Tensor
    count: int = 0
    shared: tuple[torch.Tensor, ...] = ()
    before: int = 0

    def put(self, states: torch.Tensor) -> None:
        end = self.count + len(states)
        if end > len(self.own):
            grown = self.own.new_empty(max(ROOM_AT_FIRST, end * 3 // 2), self.own.shape[1])
            grown[: self.count] = self.own[: self.count]
            self.own = grown
        self.own[self.count : end] = states
        self.count = end

    def fork(self) -> _Layer:
        if self.count:
            parts = [*self.shared, self.own[: self.count].clone()]
            if len(parts) > MOST_PARTS:
                parts = [torch.cat(parts)]
            self.shared, self.before = tuple(parts), self.before + self.count
            self.own, self.count = self.own.new_empty(0, self.own.shape[1]), 0
        return _Layer(self.own.new_empty(0, self.own.shape[1]), 0, self.shared, self.before)

    def pick(self, places: torch.Tensor) -> torch.Tensor:
        found = torch.zeros((len(places), self.own.shape[1]), device=self.own.device)
        begin = 0
        for part in (*self.shared, self.own[: self.count]):
            end = begin + len(part)
            here = ((places >= begin) & (places < end)).nonzero()[:, 0]
            if len(here):
                taken = part.index_select(0, (places[here] - begin).to(part.device))
                found.index_copy_(0, here.to(part.device), taken.to(found.dtype))
            begin = end
        return found


class PastStates:
    """Hidden states of a sequence's tokens, by model and layer: from the first token on, as far as they are known.

    A state depends on the tokens up to its own alone, and a sequence only grows: what is known stays right. Forks share
    the states of the tokens they have in common. Those of a model are forgotten when its cache of the sequence is given
    back, so that their memory is bounded by the tokens that are cached. Safe to be used from several threads.
    """

    __slots__ = ("_drafted", "_layers", "_lock")

    def __init__(self) -> None:
        self._drafted: dict[tuple[str, int], tuple[int, Block, torch.Tensor]] = {}
        self._layers: dict[tuple[str, int], _Layer] = {}
        self._lock = threading.Lock()  # forks are made while forwards run

    def __bool__(self) -> bool:
        return bool(self._layers)

    def known(self, model: str, layer: int) -> int:
        """Return how many of the first tokens have their states here.

        Args:
            model: digest of the model.
            layer: see `ReadSpec.hidden`.
        """
        held = self._layers.get((model, layer))
        return 0 if held is None else held.before + held.count

    def put(self, model: str, layer: int, start: int, states: torch.Tensor) -> None:
        """Take the states, [n, width], of the tokens from `start` on; left out where those before are not known."""
        with self._lock:
            count = self.known(model, layer)
            if start > count or start + len(states) <= count:
                return
            held = self._layers.get((model, layer))
            if held is None:
                held = self._layers[model, layer] = _Layer(states.new_empty(0, states.shape[1]))
            held.put(states[count - start :])

    def hold(self, model: str, layer: int, start: int, block: Block, states: torch.Tensor) -> None:
        """Keep the states, [n, width], of a block's rows, which would stand from `start` on, until `settle`."""
        with self._lock:
            self._drafted[model, layer] = (start, block, states.clone())

    def settle(self, tokens: Sequence[int]) -> None:
        """Take the states of those hypothetical tokens that were written.

        Args:
            tokens: of the sequence, from its first one on.
        """
        if not self._drafted:
            return
        with self._lock:
            drafted, self._drafted = self._drafted, {}
        for (model, layer), (start, block, states) in drafted.items():
            rows = _written_rows(block, tokens[start : start + len(block)])
            with torch.inference_mode():  # as forwards, whose states they are
                self.put(model, layer, start, states[rows])

    def pick(self, model: str, layer: int, places: torch.Tensor) -> torch.Tensor | None:
        """Return the states of some tokens, float32 [n, width]; zeros where they are not known. None: none is.

        Args:
            model: digest of the model.
            layer: see `ReadSpec.hidden`.
            places: of the tokens, int64 [n].
        """
        with self._lock:
            held = self._layers.get((model, layer))
            return None if held is None else held.pick(places)

    def forget(self, model: str) -> None:
        """Drop all states of a model."""
        with self._lock:
            for key in [key for key in self._layers if key[0] == model]:
                del self._layers[key]
            self._drafted = {key: held for key, held in self._drafted.items() if key[0] != model}

    def fork(self) -> PastStates:
        """Return those of a fork of the sequence."""
        twin = PastStates()
        with self._lock:
            twin._layers = {key: held.fork() for key, held in self._layers.items()}
        return twin


def _written_rows(block: Block, written: Sequence[int]) -> list[int]:
    """List the rows of a block that stand for the first of the written tokens, and saw nothing but those before."""
    rows: list[int] = []
    seen, path = block.seen().numpy(), np.zeros(len(block), dtype=np.bool_)
    for row, (token, position) in enumerate(zip(block.tokens, block.positions, strict=True)):
        if len(rows) == len(written):
            break
        if position == len(rows) and token == written[position]:
            path[row] = True
            if np.array_equal(seen[row], path):
                rows.append(row)
            else:
                path[row] = False
    return rows


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
