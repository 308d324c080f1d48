"""Layers in groups: all attentions of a group take what goes into the group, its MLPs follow one after the other."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from decoding.sketch import Depth
from engine.attention.step import AttentionStep


class SubLayers(Protocol):
    """A stack whose layers can be run half by half. Inputs are left as they are."""

    def attention(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer's attention adds to the residual stream; its keys and values are written."""
        ...

    def feed_forward(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream after a layer, from what stood before it and what its attention adds."""
        ...


def run_groups(
    stack: SubLayers, hidden: torch.Tensor, depth: Depth, num_layers: int, taps: frozenset[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Seed 178 (EasySpec), its fuzzy layers: within a group, no attention waits for another one or for an MLP.

    On one device they run one after the other all the same; devices that hold a layer each would run them at once.

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
        attended = [stack.attention(index, hidden) for index in range(start, stop)]
        for index, added in enumerate(attended, start=start):
            hidden = stack.feed_forward(index, hidden, added)
            if index + 1 in taps:
                tapped[index + 1] = hidden
    return hidden, tapped


class ModuleHalves:
    """Halves of Hugging Face decoder layers: of the usual make, Gemma's with four norms, and GPT-NeoX's.

    Args:
        layers: decoder layers.
        angles: one layer's position embeddings each.
        step: the forward's attention.
    """

    def __init__(self, layers: list[Any], angles: list[Any], step: AttentionStep) -> None:
        self._layers, self._angles, self._step = layers, angles, step
        self._four_norms = hasattr(layers[0], "pre_feedforward_layernorm")
        self._name = "self_attn" if hasattr(layers[0], "self_attn") else "attention"
        self._parallel = getattr(layers[0], "use_parallel_residual", False)  # the MLP does not see the attention

    def attention(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `SubLayers.attention`; [1, T, hidden]."""
        layer = self._layers[index]
        attended: torch.Tensor = getattr(layer, self._name)(
            layer.input_layernorm(hidden),
            position_embeddings=self._angles[index],
            attention_mask=None,
            turnout_step=self._step,
        )[0]
        return layer.post_attention_layernorm(attended) if self._four_norms else attended

    def feed_forward(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See `SubLayers.feed_forward`; [1, T, hidden]."""
        layer, after = self._layers[index], hidden + attended
        if self._four_norms:
            added = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(after)))
        else:
            added = layer.mlp(layer.post_attention_layernorm(hidden if self._parallel else after))
        result: torch.Tensor = after + added
        return result
