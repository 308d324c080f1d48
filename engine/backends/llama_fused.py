"""Decoder layers of the Llama family in fewer, larger operations than their modules use.

The same computation: query, key and value projections as one matrix, gate and up as one, rotation of queries and
keys together and in place, angles looked up instead of computed. At small batches a forward is bound by the number
of operations, not by arithmetic. Architectures that are not `fused` run their own modules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decoding.partial_forward import WHOLE, LayerSelection
from decoding.read_spec import FEED_FORWARD
from engine.architectures import architecture_of
from engine.architectures.base import ModelParts
from engine.attention.layout import Layout
from engine.attention.step import AttentionStep, Scores
from engine.backends.parallel_attention import run_groups, summed_once
from engine.backends.stacks import ModuleStack, pick
from engine.backends.weight_packing import packed

SHORTEST_TABLE = 1024  # positions


class Angles:
    """Rotary angles of every position, computed once by the model's own rotary module and looked up after that.

    Args:
        rotary: the model's rotary embedding.
        dtype: of the hidden states.
        device: where they live.
    """

    def __init__(self, rotary: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary = rotary
        self._like = torch.zeros(1, dtype=dtype, device=device)
        self._table = torch.zeros(0, 2, 1, device=device)

    def __call__(self, positions: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, [T, 1, head_dim] each, for positions [T] whose largest is `highest`."""
        cos, sin = self.table(highest).index_select(0, positions).unbind(1)
        return cos[:, None], sin[:, None]

    def table(self, highest: int) -> torch.Tensor:
        """cos and signed sin of every position up to `highest` at least: [positions, 2, head_dim]."""
        if highest >= self._table.shape[0]:
            self._grow(max(2 * self._table.shape[0], 1 << highest.bit_length(), SHORTEST_TABLE))
        return self._table

    def _grow(self, length: int) -> None:
        positions = torch.arange(length, device=self._like.device)[None]
        cos, sin = self._rotary(self._like, positions)
        half = sin.shape[-1] // 2
        # rotate_half(x) is roll(x) with its first half negated; the sign goes into the table.
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        self._table = torch.stack((cos[0], signed[0]), dim=1)


class FusedLlamaStack(ModuleStack):
    """Lean layers in place of the model's own. Takes over their weights.

    Args:
        parts: a model whose architecture is `fused`; not to be used any more.
        dtype: of its weights.
    """

    def __init__(self, parts: ModelParts, dtype: torch.dtype) -> None:
        super().__init__(parts)
        self._angles = Angles(parts.rotary, dtype, parts.device)
        self._layers = [LeanLayer(layer, index) for index, layer in enumerate(parts.layers)]
        parts.head = packed(parts.head)
        parts.layers = []

    def hidden(
        self,
        layout: Layout,
        step: AttentionStep,
        taps: frozenset[int],
        depth: LayerSelection = WHOLE,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See `engine.backends.stacks.LayerStack.hidden`; skips any sub-layer."""
        device = self._parts.device
        ids, positions = (torch.from_numpy(array).to(device) for array in (layout.tokens, layout.positions))
        hidden = self._parts.embed(ids) if states is None else states.to(self._parts.norm.weight.dtype)
        cos, sin = self._angles(positions, int(layout.positions.max()))
        if depth.groups:
            return run_groups(LeanHalves(self._layers, cos, sin, step), hidden, depth, len(self._layers), taps)
        tapped = {depth.first: hidden} if depth.first in taps else {}
        for index, layer in enumerate(self._layers[depth.first : depth.last], start=depth.first):
            if 2 * index not in depth.skipped:
                hidden = layer.attend(hidden, cos, sin, step)
            if 2 * index + 1 not in depth.skipped:
                if FEED_FORWARD in taps and index + 1 == len(self._layers):
                    tapped[FEED_FORWARD] = _rms(layer.before_mlp, hidden)
                hidden = layer.feed_forward(hidden)
            if index + 1 in taps:
                tapped[index + 1] = hidden
        return hidden, tapped

    def norm(self, hidden: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.stacks.LayerStack.norm`."""
        return _rms(self._parts.norm, pick(hidden, picked).to(self._parts.norm.weight.dtype))

    def queries(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.stacks.LayerStack.queries`."""
        cos, sin = self._angles(positions, int(positions.max()))
        return self._layers[layer].queries(hidden.to(self._parts.norm.weight.dtype), cos, sin)


class LeanLayer(nn.Module):
    """One decoder layer. Takes over the module's weights; the module must not be used any more.

    Args:
        layer: the Hugging Face decoder layer.
        index: its number.
    """

    def __init__(self, layer: Any, index: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.head_dim = attention.head_dim
        self.qkv = packed(_joined(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = packed(attention.o_proj)
        self.gate_up = packed(_joined(mlp.gate_proj, mlp.up_proj))
        self.down = packed(mlp.down_proj)
        self.activation, self.activation_name = mlp.act_fn, mlp.config.hidden_act
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.before_attention = layer.input_layernorm
        self.before_mlp = layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.scores = Scores(attention.scaling, window_of(attention))

    def attend(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """The attention sub-layer, [T, hidden] -> [T, hidden]; cos and sin are [T, 1, head_dim] from `Angles`."""
        return hidden + self.attention(hidden, cos, sin, step)

    def attention(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """What `attend` adds to the residual stream."""
        tokens = hidden.shape[0]
        qkv = self.qkv(_rms(self.before_attention, hidden)).view(tokens, -1, self.head_dim)
        rotating = qkv[:, : self.heads + self.kv_heads]
        if self.query_norm is not None and self.key_norm is not None:
            rotating[:, : self.heads] = _rms(self.query_norm, rotating[:, : self.heads])
            rotating[:, self.heads :] = _rms(self.key_norm, rotating[:, self.heads :])
        rolled = rotating.roll(self.head_dim // 2, -1)
        rotating.mul_(cos).addcmul_(rolled, sin)
        pairs = qkv[:, self.heads :].view(tokens, 2, self.kv_heads, self.head_dim)
        attended = step.attend(self.index, qkv[:, : self.heads], pairs, self.scores)
        added: torch.Tensor = self.out(attended.view(tokens, -1))
        return added

    def queries(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotated and scaled queries, [R, hidden] -> [R, heads, head_dim]; cos and sin as in `attend`."""
        qkv = self.qkv(_rms(self.before_attention, hidden)).view(hidden.shape[0], -1, self.head_dim)
        query: torch.Tensor = qkv[:, : self.heads]
        if self.query_norm is not None:
            query = _rms(self.query_norm, query)
        turned = query * cos + query.roll(self.head_dim // 2, -1) * sin
        return turned * self.scores.scaling

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The MLP sub-layer, [T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up(_rms(self.before_mlp, hidden)).chunk(2, dim=-1)
        result: torch.Tensor = hidden + self.down(self.activation(gate).mul_(up))
        return result


class LeanHalves:
    """Implements `engine.backends.parallel_attention.SubLayers`.

    Args:
        layers: a stack's.
        cos: see `LeanLayer.attend`.
        sin: as well.
        step: the forward's attention.
    """

    def __init__(self, layers: list[LeanLayer], cos: torch.Tensor, sin: torch.Tensor, step: AttentionStep) -> None:
        self._layers, self._cos, self._sin, self._step = layers, cos, sin, step

    def attentions(self, layers: range, hidden: torch.Tensor) -> list[torch.Tensor]:
        """See `engine.backends.parallel_attention.SubLayers.attentions`."""

        def attention(index: int) -> torch.Tensor:
            return self._layers[index].attention(hidden, self._cos, self._sin, self._step)

        return summed_once([self._layers[index].out for index in layers], attention, layers)

    def feed_forward(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.parallel_attention.SubLayers.feed_forward`."""
        return self._layers[index].feed_forward(hidden + attended)


def window_of(attention: Any) -> int | None:
    """The sliding window of an attention module of a fused architecture, None when it sees everything."""
    return architecture_of(attention.config).window(attention)


def _rms(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return normed


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer that computes several of the same input."""
    first = linears[0]
    with torch.device("meta"):
        joined = nn.Linear(first.in_features, sum(linear.out_features for linear in linears), first.bias is not None)
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined
