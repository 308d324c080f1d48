"""Layers in groups: all attentions of a group take what goes into the group, its MLPs follow one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from decoding.partial_forward import LayerSelection
from engine.architectures.base import Halves
from engine.attention.step import AttentionStep


class SubLayers(Protocol):
    """A stack whose layers can be run half by half. Inputs are left as they are."""

    def attentions(self, layers: range, hidden: torch.Tensor) -> list[torch.Tensor]:
        """What the attention of each layer adds to the residual stream; their keys and values are written."""
        ...

    def feed_forward(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream after a layer, from what stood before it and what its attention adds."""
        ...


def run_groups(
    stack: SubLayers, hidden: torch.Tensor, depth: LayerSelection, num_layers: int, taps: frozenset[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Paper #178 (EasySpec), its fuzzy layers: within a group, no attention waits for another one or for an MLP.

    On one device they run one after the other all the same. Where the model is split over several, their outputs are
    added up over the devices once for the group, in place of once for each layer: see `summed_once`.

    Args:
        stack: runs halves of layers.
        hidden: what goes into layer `depth.first`.
        depth: which layers, in which groups.
        num_layers: of the model.
        taps: layers whose output is wanted too.

    Returns:
        What comes out, and the tapped outputs: a layer's is the residual stream after its own MLP.
    """
    tapped = {depth.first: hidden} if depth.first in taps else {}
    for start, stop in depth.spans(num_layers):
        for index, added in enumerate(stack.attentions(range(start, stop), hidden), start=start):
            hidden = stack.feed_forward(index, hidden, added)
            if index + 1 in taps:
                tapped[index + 1] = hidden
    return hidden, tapped


class Summed(Protocol):
    """A projection whose output adds up over the devices that share the model.

    Attributes:
        partial: whether its forward leaves out the sum and what follows it.
    """

    partial: bool

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the devices, in place; any shape."""
        ...

    def whole(self, summed: torch.Tensor) -> torch.Tensor:
        """What its forward gives, from the sum."""
        ...


def summed_once(projections: list[Any], attention: Callable[[int], torch.Tensor], layers: range) -> list[torch.Tensor]:
    """Attentions whose sums over devices are one: a sum of little data costs as much as one of a little more.

    Args:
        projections: the last step of each layer's attention: `Summed` where the model is split.
        attention: of a layer, what its projection gives.
        layers: by number.
    """
    split: list[Summed] = [each for each in projections if hasattr(each, "partial")]
    if len(split) < 2:
        return [attention(index) for index in layers]
    try:
        for each in split:
            each.partial = True
        parts = torch.stack([attention(index) for index in layers])
    finally:
        for each in split:
            each.partial = False
    return [each.whole(summed) for each, summed in zip(split, split[0].sum(parts).unbind(0), strict=True)]


class ModuleHalves:
    """Halves of Hugging Face decoder layers.

    Args:
        names: of what they consist of.
        layers: decoder layers.
        angles: one layer's position embeddings each.
        step: the forward's attention.
        positions: int64 [1, T].
    """

    def __init__(
        self, names: Halves, layers: list[Any], angles: list[Any], step: AttentionStep, positions: torch.Tensor
    ) -> None:
        self._names, self._layers, self._angles, self._step = names, layers, angles, step
        self._positions = positions
        parallel = names.parallel
        self._parallel = parallel if isinstance(parallel, bool) else bool(getattr(layers[0], parallel))
        self._factor = 1.0 if names.factor is None else float(getattr(layers[0], names.factor))

    def attentions(self, layers: range, hidden: torch.Tensor) -> list[torch.Tensor]:
        """See `SubLayers.attentions`; [1, T, hidden]."""
        names = self._names

        def attention(index: int) -> torch.Tensor:
            layer = self._layers[index]
            attended: torch.Tensor = getattr(layer, names.attention)(
                normed(layer, names.before_attention, hidden),
                position_embeddings=self._angles[index],
                position_ids=self._positions,
                attention_mask=None,
                turnout_step=self._step,
                turnout_positions=self._positions[0],
            )[0]
            return attended

        modules = [getattr(self._layers[index], names.attention) for index in layers]
        attended = summed_once([getattr(module, names.output) for module in modules], attention, layers)
        return [
            self._scaled(normed(self._layers[at], names.after_attention, each))
            for at, each in zip(layers, attended, strict=True)
        ]

    def feed_forward(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See `SubLayers.feed_forward`; [1, T, hidden]."""
        layer, after = self._layers[index], hidden + attended
        seen = hidden if self._parallel else after
        added = normed(layer, self._names.after_mlp, layer.mlp(normed(layer, self._names.before_mlp, seen)))
        return after + self._scaled(added)

    def _scaled(self, added: torch.Tensor) -> torch.Tensor:
        return added if self._factor == 1.0 else added * self._factor


def normed(layer: Any, name: str | None, states: torch.Tensor) -> torch.Tensor:
    """States after a layer's norm of this name; None: as they are."""
    if name is None:
        return states
    after: torch.Tensor = getattr(layer, name)(states)
    return after
