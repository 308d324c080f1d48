"""The Llama family in compiled kernels: all decoder layers of a forward in one call."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from decoding.partial_forward import WHOLE, LayerSelection
from decoding.read_spec import FEED_FORWARD
from engine.architectures.base import ModelParts
from engine.attention.layout import Layout
from engine.attention.step import AttentionStep, Scores
from engine.backends.llama_fused import Angles, window_of
from engine.backends.native import library as native
from engine.backends.native.attention import NativeStep, scores_struct
from engine.backends.native.weights import interleaved, matrix_of, product_of
from engine.backends.parallel_attention import run_groups
from engine.backends.stacks import Head
from engine.cache.paged_kv import PagedKV

MAX_HEAD_DIM = 1024


def fits_native(parts: ModelParts) -> bool:
    """Whether `NativeStack` can run this model; other models run their own modules over native linears."""
    if not parts.fused:
        return False
    attention = parts.layers[0].self_attn
    silu = parts.layers[0].mlp.config.hidden_act == "silu"
    even = parts.norm.weight.shape[0] % 2 == 0 and attention.head_dim % 2 == 0
    return bool(silu and even and attention.head_dim <= MAX_HEAD_DIM)


class NativeStack:
    """See `engine.backends.stacks.LayerStack`; skips any sub-layer. Hidden states are float32 whatever the weights are.

    Args:
        parts: a model that `fits_native`; its weights are taken over.
        dtype: of its weights, bfloat16 or float32.
    """

    def __init__(self, parts: ModelParts, dtype: torch.dtype) -> None:
        attention = parts.layers[0].self_attn
        self._half = dtype == torch.bfloat16
        self._dtype = dtype
        self._embed = parts.embed
        self._angles = Angles(parts.rotary, torch.float32, parts.device)
        self._layers = [NativeLayer(layer, dtype) for layer in parts.layers]
        self._structs = (native.Layer * len(self._layers))(*(layer.struct for layer in self._layers))
        self._head = matrix_of([parts.head], dtype)
        self._norm = parts.norm.weight.detach().float()
        self._shape = native.Shape(
            hidden=self._norm.shape[0],
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            dim=attention.head_dim,
            intermediate=parts.layers[0].mlp.down_proj.in_features,
            epsilon=parts.norm.variance_epsilon,
        )
        self._space = _Space(self._shape, dtype)
        self._store: PagedKV | None = None
        self._skipped: frozenset[int] = frozenset()
        parts.layers = []

    def hidden(
        self,
        layout: Layout,
        step: AttentionStep,
        taps: frozenset[int],
        depth: LayerSelection = WHOLE,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See `engine.backends.stacks.LayerStack.hidden`; float32 [T, hidden]."""
        step = cast(NativeStep, step)
        if step.store is not self._store:
            self._use(step)
        if depth.skipped != self._skipped:
            self._skip(depth.skipped)
        # The layers write where they read.
        hidden = self._embed(torch.from_numpy(layout.tokens)).float() if states is None else states.float().clone()
        angles = self._angles.table(int(layout.positions.max()))
        space = self._space.of(hidden)
        if depth.groups:
            return run_groups(NativeHalves(self, step, angles), hidden, depth, len(self._layers), taps)
        first, end = depth.first, len(self._layers) if depth.last is None else depth.last
        tapped = {first: hidden.clone()} if first in taps else {}
        opened = end if FEED_FORWARD in taps and end == len(self._layers) > first else None
        stops = {tap for tap in taps if first < tap <= end} | ({end - 1} - {first} if opened else set())
        for last in sorted(stops | {end}):
            if last == opened and 2 * last - 1 not in depth.skipped:
                tapped[FEED_FORWARD] = self._open(last - 1, hidden, step, angles)
            else:
                self.run(first, last, step, angles, space)
            if last in taps:
                tapped[last] = hidden.clone()
            first = last
        return hidden, tapped

    def run(self, first: int, last: int, step: NativeStep, angles: torch.Tensor, space: native.Space) -> None:
        """Layers first..last-1 over the rows of a space, in place."""
        native.library().turnout_forward(
            self._half,
            self._structs,
            first,
            last,
            self._shape,
            step.batch,
            angles.data_ptr(),
            space,
            torch.get_num_threads(),
        )

    def half(self, index: int, mlp: bool, hidden: torch.Tensor, step: NativeStep, angles: torch.Tensor) -> None:
        """One half of a layer over [T, hidden], in place: the MLP, or the attention."""
        struct = self._structs[index]
        struct.skips_attention, struct.skips_mlp = mlp, not mlp
        try:
            self.run(index, index + 1, step, angles, self._space.of(hidden))
        finally:
            struct.skips_attention, struct.skips_mlp = 2 * index in self._skipped, 2 * index + 1 in self._skipped

    def _open(self, index: int, hidden: torch.Tensor, step: NativeStep, angles: torch.Tensor) -> torch.Tensor:
        """A layer over [T, hidden], in place; what goes into its MLP."""
        if 2 * index not in self._skipped:
            self.half(index, False, hidden, step, angles)
        fed = self._layers[index].normed_for_mlp(hidden, self._shape)
        self.half(index, True, hidden, step, angles)
        return fed

    def setups(self, most_blocks: int) -> Iterable[tuple[int, int, int]]:
        """See `engine.backends.stacks.LayerStack.setups`."""
        return ()

    def queries(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.stacks.LayerStack.queries`; float32."""
        cos, sin = self._angles(positions, int(positions.max()))
        return self._layers[layer].queries(hidden, cos, sin, self._shape)

    def _skip(self, skipped: frozenset[int]) -> None:
        for index, struct in enumerate(self._structs):
            struct.skips_attention, struct.skips_mlp = 2 * index in skipped, 2 * index + 1 in skipped
        self._skipped = skipped

    def _use(self, step: NativeStep) -> None:
        """Point the layers at this cache."""
        for struct, cache in zip(self._structs, step.store.layers, strict=True):
            struct.cache = cache.data_ptr()
        self._shape.byte_cache = step.store.kv_dtype == "int8"
        self._store = step.store

    def norm(self, hidden: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.stacks.LayerStack.norm`; in the weights' dtype."""
        normed = torch.empty(len(picked), hidden.shape[1], dtype=self._dtype)
        native.library().turnout_norm(
            self._half,
            hidden.data_ptr(),
            picked.data_ptr(),
            len(picked),
            hidden.shape[1],
            self._norm.data_ptr(),
            self._shape.epsilon,
            normed.data_ptr(),
        )
        return normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.stacks.LayerStack.logits`."""
        return self._head(normed, wide=True)

    def head_of(self, ids: torch.Tensor) -> Head:
        """See `engine.backends.stacks.LayerStack.head_of`."""
        return partial(self._head.part(ids), wide=True)


class NativeHalves:
    """Implements `engine.backends.parallel_attention.SubLayers`.

    Args:
        stack: whose layers.
        step: the forward's attention.
        angles: of every position.
    """

    def __init__(self, stack: NativeStack, step: NativeStep, angles: torch.Tensor) -> None:
        self._stack, self._step, self._angles = stack, step, angles

    def attentions(self, layers: range, hidden: torch.Tensor) -> list[torch.Tensor]:
        """See `engine.backends.parallel_attention.SubLayers.attentions`."""
        return [self._attention(index, hidden) for index in layers]

    def _attention(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        after = hidden.clone()
        self._stack.half(index, False, after, self._step, self._angles)
        return after.sub_(hidden)

    def feed_forward(self, index: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See `engine.backends.parallel_attention.SubLayers.feed_forward`."""
        after = hidden + attended
        self._stack.half(index, True, after, self._step, self._angles)
        return after


class NativeLayer:
    """One decoder layer's weights, packed, and the struct that points at them.

    Args:
        layer: its weights are taken over.
        dtype: of activations.
    """

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate, up = mlp.gate_proj, mlp.up_proj
        self._qkv = product_of(projections, dtype)
        self._out = matrix_of([attention.o_proj], dtype)
        self._gate_up = product_of([gate, up], dtype, lambda both: interleaved(*both))
        self._down = matrix_of([mlp.down_proj], dtype)
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)]
        self._norms = [None if norm is None else norm.weight.detach().float().contiguous() for norm in norms]
        for linear in (*projections, attention.o_proj, gate, up, mlp.down_proj):
            linear.weight = linear.integers = None  # the packed copy is the only one that stays in memory
        self.struct = native.Layer(
            self._qkv.struct,
            self._out.struct,
            self._gate_up.struct,
            self._down.struct,
            *(None if norm is None else norm.data_ptr() for norm in self._norms),
            None,
            scores_struct(Scores(attention.scaling, window_of(attention))),
            False,
            False,
        )

    def queries(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: native.Shape) -> torch.Tensor:
        """Rotated and scaled queries, [R, hidden] -> float32 [R, heads, head_dim]; cos and sin are [R, 1, head_dim]."""
        before, query_norm = self._norms[0], self._norms[2]
        normed = F.rms_norm(hidden.float(), hidden.shape[1:], before, shape.epsilon)
        qkv = self._qkv(normed.to(self._qkv.dtype), wide=True)
        query = qkv[:, : shape.heads * shape.dim].view(len(hidden), shape.heads, shape.dim)
        if query_norm is not None:
            query = F.rms_norm(query, (shape.dim,), query_norm, shape.epsilon)
        scale: float = self.struct.scores.scale
        return (query * cos + query.roll(shape.dim // 2, -1) * sin) * scale

    def normed_for_mlp(self, hidden: torch.Tensor, shape: native.Shape) -> torch.Tensor:
        """The norm before the MLP, [T, hidden] -> float32 [T, hidden]."""
        return F.rms_norm(hidden.float(), hidden.shape[1:], self._norms[1], shape.epsilon)


class _Space:
    """Working memory that grows to the largest forward seen."""

    def __init__(self, shape: native.Shape, dtype: torch.dtype) -> None:
        heads = shape.heads + 2 * shape.kv_heads
        self._widths = (shape.hidden, heads * shape.dim, shape.heads * shape.dim, shape.intermediate)
        self._dtype = dtype
        self._rows = 0
        self._buffers: list[torch.Tensor] = []

    def of(self, hidden: torch.Tensor) -> native.Space:
        """Room for the rows of `hidden` [T, hidden]."""
        if len(hidden) > self._rows:
            self._rows = len(hidden)
            self._buffers = [torch.empty(self._rows, width, dtype=self._dtype) for width in self._widths]
        return native.Space(hidden.data_ptr(), *(buffer.data_ptr() for buffer in self._buffers))
