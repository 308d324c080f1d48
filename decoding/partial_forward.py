"""Partial forwards: hypothetical tokens through some of a model's layers, for drafts by the target itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoding.tree import ROOT


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """Selection of the decoder layers of a model that run.

    Attributes:
        first: the first layer; what goes into it is given unless it is 0.
        last: one behind the last layer; None: all.
        skipped: sub-layers left out, 2 i for layer i's attention and 2 i + 1 for its MLP: the residual stream passes.
        groups: [start, stop) of layers whose attentions all take what goes into the first of them, in order; the MLPs
            follow one after the other. Nothing of these layers is skipped.

    Raises:
        ValueError: layers are both in groups and skipped, or groups overlap or leave the range.
    """

    first: int = 0
    last: int | None = None
    skipped: frozenset[int] = frozenset()
    groups: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            return
        bounds = [self.first, *(bound for group in self.groups for bound in group)]
        if self.last is not None:
            bounds.append(self.last)
        if self.skipped or bounds != sorted(bounds):
            raise ValueError("groups stand in order within the layers that run, and no other layer is skipped")

    def spans(self, num_layers: int) -> list[tuple[int, int]]:
        """The layers that run, [start, stop) each: the groups, and every other layer by itself."""
        spans: list[tuple[int, int]] = []
        at = self.first
        end = num_layers if self.last is None else self.last
        for start, stop in (*self.groups, (end, end)):
            spans += [(layer, layer + 1) for layer in range(at, start)]
            if stop > start:
                spans.append((start, stop))
            at = stop
        return spans

    @property
    def is_prefix(self) -> bool:
        """True if it is the first layers, whole, and not all: the others can run later."""
        return self.last is not None and self == LayerSelection(last=self.last)

    def runs(self, num_layers: int) -> float:
        """Return the number of layers that run."""
        last = num_layers if self.last is None else self.last
        left_out = sum(self.first <= each // 2 < last for each in self.skipped)
        return last - self.first - left_out / 2


WHOLE = LayerSelection()

# What came out of the layers at the tokens read, [n, hidden] -> what goes into the model's output matrix, [n, hidden].
Exit = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sketch:
    """Hypothetical tokens after a part of a sequence, to be run through some layers.

    Attributes:
        base: tokens of the sequence before them; the cache is brought up to these, and forgets what follows.
        tokens: [n] token ids; without `states` the first are usually the sequence's own last ones.
        parents: [n] index of the token each stands after, -1 for the last one of the base.
        start: the first token to run; those before it are as in the sketch before this one, whose cache is used.
        depth: the layers.
        states: [n, hidden] what goes into layer `depth.first`, with `start` 0; None where the layer is 0.
        exit: what stands in place of the last norm, for what is read. Given float32 on the CPU, in the model's thread,
            and once more for the same tokens where a forward that failed is repeated.
    """

    base: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    start: int
    depth: LayerSelection
    states: torch.Tensor | None = None
    exit: Exit | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not 0 <= self.start < len(self.tokens):
            raise ValueError("a sketch has a parent for every token, and at least one token to run")
        if self.base < 1 or (self.depth.first > 0) != (self.states is not None) or (self.start and self.depth.first):
            raise ValueError("states, of all tokens, go into a layer other than the first, after at least one token")

    @classmethod
    def chain(
        cls, base: int, tokens: tuple[int, ...], start: int, depth: LayerSelection, exit: Exit | None = None
    ) -> Sketch:
        """Tokens one after the other."""
        return cls(base, tokens, tuple(range(ROOT, len(tokens) - 1)), start, depth, exit=exit)
